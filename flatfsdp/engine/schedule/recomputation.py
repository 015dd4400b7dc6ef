"""What checkpoints run again in one backward, and may still; pure.

[Note: recomputed] A reentrant checkpoint runs its units without a graph first, and again inside the backward, where
they are gathered without a turn in the plan: on every rank, since none can leave the checkpoint out. Where a unit is
recomputed more than once it is freed and gathered for each, and its gradients are reduced when this backward is
through with its first run, whichever of them brought some on this rank. What is trained and was recomputed is reduced
on all ranks, also where a rank's data brings it no gradient: when the node that recomputed it is over. An owner of
tied parameters takes part as if it were run where a unit that holds them is.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from .backward_clock import NEVER, BackwardClock
from .order import CheckpointRegion, ForwardRecord

U = TypeVar("U", bound=Hashable)


class RecomputedUnits(Generic[U]):
    """Which units stay whole since a checkpoint may run them again: a rank that freed one would gather it alone.

    Attributes:
        segments: what checkpoints without reentrance run again.
        held_unsharded: units that are through, and when what they may be recomputed with began.
        used_repeatedly: units outside of the plan that a reentrant checkpoint ran or lent more than once, and its node.
    """

    def __init__(self, clock: BackwardClock[U]) -> None:
        self.segments = tuple(clock.span.segments)
        self.held_unsharded: dict[U, int] = {}
        self.used_repeatedly: dict[U, int] = {}
        self._span, self._began, self._begun = clock.span, clock.began, clock.begun
        lasting = [each for each in self.segments if each.ended > each.began]
        self._begins = sorted(each.began for each in lasting)
        self._ends = sorted(each.ended for each in lasting)
        self._runs: dict[U, int] = {}  # how many times those of the plan have run again
        self._runs_in_first_call: dict[U, int] = {}  # while the backward of the first of their calls went on
        self._used_in: dict[U, int] = {}  # the node whose backward ran them again last, or lent them

    def record_run(self, unit: U, is_in_call: Callable[[U, int | None], bool]) -> None:
        """`unit`, which is of the plan, runs again; `is_in_call`: whether the backward goes on of the call of a unit
        that began then."""
        self._runs[unit] = self._runs.get(unit, 0) + 1
        if unit in self._span.again and is_in_call(unit, self._began.get(unit)):
            self._runs_in_first_call[unit] = self._runs_in_first_call.get(unit, 0) + 1

    def are_over(self, unit: U) -> bool:
        """Whether all checkpoints around its first call have run `unit` again: each runs what is inside of it once."""
        own = self._began.get(unit, NEVER)
        # Those that had begun by then, less those that had ended: not one by one, since every unit asks.
        around = bisect.bisect_right(self._begins, own) - bisect.bisect_right(self._ends, own)
        if unit not in self._span.again:
            return self._runs.get(unit, 0) >= around
        return self._runs_in_first_call.get(unit, 0) >= around or self._runs.get(unit, 0) >= self._of_all_calls(unit)

    def _of_all_calls(self, unit: U) -> int:
        count = 0
        for innermost in self._span.inside.get(unit, ()):
            around: CheckpointRegion | None = innermost
            while around is not None:
                count, around = count + 1, around.around
        return count

    def hold(self, unit: U) -> bool:
        """Whether `unit` stays whole until what may be recomputed with it is over."""
        own = self._began.get(unit, NEVER)
        held_for = min((each.began for each in self.segments if each.began < own < each.ended), default=NEVER)
        holds = bool(self._begun) and self._began[self._begun[-1]] >= held_for
        if holds:
            self.held_unsharded[unit] = int(held_for)
        return holds

    def let_go(self, over: U) -> Iterator[U]:
        """What was held since it might have been recomputed with `over`, or with what began later."""
        for unit, began in tuple(self.held_unsharded.items()):
            if began >= self._began[over]:
                del self.held_unsharded[unit]
                yield unit

    def record_use(self, units: Iterable[U], node: int, plan: Container[U]) -> None:
        """`units`, one and its owners, run again in the reentrant checkpoint of `node`: they may more than once."""
        for each in units:
            if each not in plan:
                if self._used_in.get(each) == node:
                    self.used_repeatedly[each] = node
                self._used_in[each] = node

    def end_repeated_use(self, node: int) -> Iterator[U]:
        """What other nodes than the running one used more than once."""
        for unit, used_in in tuple(self.used_repeatedly.items()):
            if used_in != node:
                del self.used_repeatedly[unit]
                yield unit


class ReentrantRuns(Generic[U]):
    """What reentrant checkpoints have run again that is outside of the plan, having had no graph.

    Attributes:
        trained: what got a graph so, and takes part in this backward.
        unreached: what a node, which stands for that, has run again with a graph, and no gradient has reached since.
        node: the node whose backward ran such units again last.
    """

    def __init__(self, record: ForwardRecord[U], clock: BackwardClock[U]) -> None:
        self.trained: dict[U, None] = {}
        self.unreached: dict[U, int] = {}
        self.node = 0
        self._record, self._due = record, clock.due
        self._frozen_in: dict[U, int] = {}  # the node whose backward recomputed a frozen unit last
        self._runs: dict[U, int] = {}  # how many of their runs were recomputed, the last first
        self._repeated: dict[U, int] = {}  # in how many segments the next of these ran again without a graph

    def is_another(self, unit: U, node: int) -> bool:
        """Whether another node than this one recomputed `unit`, a frozen one, before."""
        before, self._frozen_in[unit] = self._frozen_in.get(unit, node), node
        return before != node

    def end_of(self, unit: U, with_graph: bool) -> float:
        """When the last call of `unit` ended, and what is recomputed with it; or the one that is recomputed now where
        it had no graph, with what is recomputed before it gets one."""
        if unit in self._due:
            return self._due[unit]
        segment = self._segment_of(unit, with_graph)
        return self._record.left(unit, later=self._runs.get(unit, 0)) if segment is None else segment.ended

    def record_run(self, unit: U, with_graph: bool) -> bool:
        """`unit` runs again; True if it is not to be repeated before it gets a graph."""
        if self._segment_of(unit, with_graph) is not None:
            self._repeated[unit] = self._repeated.get(unit, 0) + 1
            return False
        self._runs[unit] = self._runs.get(unit, 0) + 1
        self._repeated.pop(unit, None)
        return True

    def _segment_of(self, unit: U, with_graph: bool) -> CheckpointRegion | None:
        """The segment that is recomputed, in which `unit` runs without a graph as it did in the forward."""
        if with_graph:
            return None
        around = self._record.left_in(unit, later=self._runs.get(unit, 0))
        return around[max(0, len(around) - 1 - self._repeated.get(unit, 0))] if around else None
