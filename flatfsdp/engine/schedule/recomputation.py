"""What checkpoints run again in one backward, and may still; pure.

[Note: recomputed] A reentrant checkpoint runs its units without a graph first, and again inside the backward, where
they are gathered without a turn in the plan: on every rank, since none can leave the checkpoint out; whether it will
come, autograd knows from the begin. Inside of a checkpoint without reentrance they run once more before, without a
graph: ranks may pass over units in there before it runs again or after, so that gather, from which the unit stays
whole, has a turn with theirs. Where a unit is recomputed more than once it is freed and gathered for each, and its
gradients are reduced when this backward is through with its first run, whichever of them brought some on this rank.
What is trained and was recomputed is reduced on all ranks, also where a rank's data brings it no gradient: when the
node that recomputed it is over. An owner of tied parameters takes part as if it were run where a unit that holds them
is: what one node made a graph of, or used in one, is freed before another does, since ranks to which all gradients
came have freed it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from .backward_clock import NEVER, BackwardClock
from .forward_record import CheckpointRegion, ForwardRecord

U = TypeVar("U", bound=Hashable)


def _add_one(counts: dict[U, int], unit: U) -> None:
    counts[unit] = counts.get(unit, 0) + 1


class Recomputations(Generic[U]):
    """What of the plan stays whole since a checkpoint may run it again, for a rank that freed it would gather it alone;
    and what reentrant checkpoints have run again that is outside of the plan, having had no graph.

    Attributes:
        held_unsharded: units that are through, and when what they may be recomputed with began.
        trained: what is outside of the plan and got a graph, so that it takes part in this backward.
        node: the node whose backward ran such units again last.
        used_repeatedly: units outside of the plan that a reentrant checkpoint ran or used more than once, and its node.
        to_come: when units outside of the plan began that reentrant checkpoints will run again, the next last.
        unreached: units outside of the plan that ran again, and no gradient has flowed into them since.
        will_run: all that reentrant checkpoints will run again, when the backward begins.
    """

    def __init__(
        self, record: ForwardRecord[U], clock: BackwardClock[U], will_recompute: Callable[[object], bool]
    ) -> None:
        self.held_unsharded: dict[U, int] = {}
        self.trained: dict[U, None] = {}
        self.node = 0
        self.used_repeatedly: dict[U, int] = {}
        self._record, self._clock = record, clock
        lasting = [each for each in clock.regions if each.ended > each.began]
        self._bounds = sorted(each.began for each in lasting), sorted(each.ended for each in lasting)
        self._begun_before = _begun_before(clock) if lasting and (clock.several or clock.tied_owners) else {}
        self._runs: dict[U, int] = {}  # how many times those of the plan have run again
        self._runs_in_first_call: dict[U, int] = {}  # while the backward of the first of their calls went on
        self._used_in: dict[U, int] = {}  # the node whose backward ran them again last, or used them
        self._made_in: dict[U, int] = {}  # the node whose backward made graphs of them last, or used them in one
        self._outermost = 0  # the node that runs, or that the graph tasks run in that do
        self._made: dict[U, int] = {}  # of units outside of the plan, how many runs were recomputed, the last first
        self.to_come: list[tuple[int, U]] = []
        self.will_run: dict[U, None] = {}
        self.unreached: set[U] = set()
        self._segmented: set[U] = set()  # units that checkpoints without reentrance run again
        for log in record.passes if record.ran_without_graph else ():
            self._segmented.update(unit for unit, _, how, inside in log.runs if how == "graph" and inside is not None)
            for unit, began, checkpoint in log.reentrant:
                if will_recompute(checkpoint):
                    self.will_run[unit] = None
                    if unit not in clock.planned:
                        self.to_come.append((began, unit))
        self._running: set[U] = set()  # of those whose graph is to come
        self._repeated: dict[U, int] = {}  # in how many segments the next of these ran again without a graph

    # -- units of the plan -------------------------------------------------------------------------------------------

    def record_run(self, unit: U, is_in_call: Callable[[U, int | None], bool]) -> None:
        """`unit`, which is of the plan, runs again; `is_in_call`: whether the backward goes on of the call of a unit
        that began then."""
        _add_one(self._runs, unit)
        if unit in self._clock.several and is_in_call(unit, self._clock.began.get(unit)):
            _add_one(self._runs_in_first_call, unit)

    def are_over(self, unit: U) -> bool:
        """Whether all checkpoints around its first call have run `unit` again: each runs what is inside of it once."""
        own = self._clock.began.get(unit, NEVER)
        # Those that had begun by then, less those that had ended: not one by one, since every unit asks.
        begins, ends = self._bounds
        around = bisect.bisect_right(begins, own) - bisect.bisect_right(ends, own)
        if unit not in self._clock.several:
            return self._runs.get(unit, 0) >= around
        of_all_calls = sum(len([*inner.outwards()]) for inner in self._clock.inside.get(unit, ()))
        return self._runs_in_first_call.get(unit, 0) >= around or self._runs.get(unit, 0) >= of_all_calls

    def hold(self, unit: U) -> bool:
        """Whether `unit` stays whole until what may be recomputed with it is over."""
        began, begun, before = self._clock.began, self._clock.begun, self._begun_before
        own = began.get(unit, NEVER)
        around = (each for each in self._clock.regions if each.began < own < each.ended)
        held_for = min((before.get(each, each.began) for each in around), default=NEVER)
        holds = bool(begun) and began[begun[-1]] >= held_for
        if holds:
            self.held_unsharded[unit] = int(held_for)
        return holds

    def let_go(self, over: U) -> Sequence[U]:
        """What was held since it might have been recomputed with `over`, or with what began later."""
        free = [unit for unit, began in self.held_unsharded.items() if began >= self._clock.began[over]]
        for unit in free:
            del self.held_unsharded[unit]
        return free

    # -- units outside of it -----------------------------------------------------------------------------------------

    def enter(self, node: int) -> None:
        """`node` of the backward's own graph task runs units again, and what is inside of them."""
        self._outermost = node

    def is_another(self, unit: U, with_graph: bool) -> bool:
        """Whether another node than the one that runs `unit` again made a graph of it before."""
        before = self._made_in.get(unit, self._outermost)
        if with_graph:
            self._made_in[unit] = self._outermost
        return before != self._outermost

    def end_of(self, unit: U, with_graph: bool) -> float:
        """When the last call of `unit` ended, and what is recomputed with it; or the one that is recomputed now where
        it had no graph, with what is recomputed before it gets one."""
        due, ended = self._clock.due.get(unit, 0), (self._segment_of(unit, with_graph) or self._left(unit)[0]).ended
        return max(due, ended) if not ended or unit in self._segmented else ended

    def record_reentrant_run(self, unit: U, needed: Iterable[U], node: int, with_graph: bool) -> None:
        """`unit` runs again in the backward of `node`, and so maybe do the `needed`, itself and its owners, more than
        once: where it is not to be repeated before it gets a graph."""
        if self.is_segmented(unit):
            return
        if self._segment_of(unit, with_graph) is not None:
            _add_one(self._repeated, unit)
            return
        _add_one(self._made, unit)
        self._repeated.pop(unit, None)
        self._running.add(unit)
        for each in needed:
            if each not in self._clock.planned:
                if self._used_in.get(each) == node:
                    self.used_repeatedly[each] = node
                self._used_in[each] = node

    def will_repeat(self, unit: U) -> bool:
        """Whether a segment is to run `unit` again without a graph, from when on it stays whole: it is gathered once,
        in its turn, though others may use its parameters before."""
        return unit in self._clock.repeated and unit not in self._made

    def is_segmented(self, unit: U) -> bool:
        """Whether checkpoints without reentrance run `unit` again, as far as that is known."""
        return unit in self._segmented or (unit in self._clock.planned and unit not in self.will_run)

    def record_graph(self, unit: U) -> None:
        """`unit`, which runs again, has a graph, and its reduction a place."""
        if unit in self._running:
            self._running.remove(unit)
            made = (at for at in reversed(range(len(self.to_come))) if self.to_come[at][1] == unit)
            if (last := next(made, None)) is not None:
                del self.to_come[last]

    def _segment_of(self, unit: U, with_graph: bool) -> CheckpointRegion | None:
        """The segment that is recomputed, in which `unit` runs without a graph as it did in the forward."""
        around = () if with_graph else self._left(unit)[1]
        return around[max(0, len(around) - 1 - self._repeated.get(unit, 0))] if around else None

    def _left(self, unit: U) -> tuple[CheckpointRegion, Sequence[CheckpointRegion]]:
        return self._record.left(unit, later=self._made.get(unit, 0))


def _begun_before(clock: BackwardClock[U]) -> dict[CheckpointRegion, int]:
    """When the first of the units in a segment began, where that was before the segment: one that was called earlier,
    too, or whose parameters another unit had used. Until that is over its call in the segment may be to come."""
    found: dict[CheckpointRegion, int] = {}
    for unit, inside in clock.inside.items():
        began = clock.began.get(unit, NEVER)
        for each in {each for inner in inside for each in inner.outwards()}:
            if began <= each.began:
                found[each] = min(int(began), found.get(each, each.began))
    return found


def taken_from(nodes: dict[U, int], node: int) -> Sequence[U]:
    """What other nodes than this one left there, which is taken away."""
    found = [unit for unit, each in nodes.items() if each != node]
    for unit in found:
        del nodes[unit]
    return found
