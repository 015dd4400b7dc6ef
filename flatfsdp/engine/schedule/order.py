"""The order of a backward's collectives, as a pure function of the order of the forward.

[Note: backward order] Ranks may run different autograd graphs (a parameter unused here, a branch there), so the moment
at which a unit's backward begins or its last gradient arrives is no common order. What ranks do share is the order of
the forward.
Hence: *gathers* of a backward are issued in the reverse of the order in which units finished their forward, and
*reductions* in the reverse of the order in which units began it; each on a communicator of its own, so the two
sequences need no common interleaving. A unit that is ready before its turn waits; at the end of the backward all that
remain are flushed in order. In a model that is nested like a tree, ready means on turn, and nobody waits.

Ranks do wait for each other's gathers and reductions, and none may wait for one while another, which waits for this
rank, has not issued it. So both are on one clock, which runs backwards from the end of the forward: the gather of a
unit is due when it last *ended*, its reduction when it first *began*. Who waits for a collective has issued all that
are due before it; of all that ranks wait for, the first to be due is then issued by every rank. Autograd makes that
possible: it takes the newest node first, so when it reaches a unit's end, it has been through with all that began
later, and gradients of those that have not come never will. For the same reason a unit that was called more than once
stays gathered until its first call is over: a rank that got its gradients from the last calls, or has no graph of the
others, would gather it again, alone.

A checkpoint without reentrance recomputes all units in its *segment* when a backward reaches the first of them, and
gathers them for it: their gathers are due when the last of them ended, also on ranks that do not reach that one.
"""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)


class ForwardPass:
    """One forward of a model; it lives as long as the graph that was made in it."""

    __slots__ = ("__weakref__",)


@dataclass
class CheckpointRegion:
    """What one checkpoint without reentrance recomputes: from the begin of its first unit to the end of its last.

    Attributes:
        around: the checkpoint that this one is recomputed inside of.
    """

    began: int
    ended: int = 0
    around: CheckpointRegion | None = None


class ExecutionInterval(Generic[U]):
    """When units ran with a graph in one pass, or in several, in ticks of one clock.

    Attributes:
        began: when each was first entered; dict order = that order.
        ended: when each last finished with an output that can bring it a gradient.
        again: those that were entered more than once.
        segments: what checkpoints will recompute, on this rank or on others: which of them can at all hangs on what
            their functions saved on a rank.
        inside: the innermost of them, one for each call of a unit in any.
        known: these, by what lives as long as they can here.
        unseen: when those were first entered that ran without a graph, which a reentrant checkpoint will make; of
            several passes only those that ran with one, too.
    """

    def __init__(self) -> None:
        self.began: dict[U, int] = {}
        self.ended: dict[U, int] = {}
        self.again: set[U] = set()
        self.unseen: dict[U, int] = {}
        self.segments: list[CheckpointRegion] = []
        self.inside: dict[U, list[CheckpointRegion]] = {}
        self.known: weakref.WeakKeyDictionary[object, CheckpointRegion] = weakref.WeakKeyDictionary()

    @classmethod
    def around(cls, spans: Iterable[ExecutionInterval[U]]) -> ExecutionInterval[U]:
        """From the first begin to the last end in any of `spans`, with a graph or without: a unit that has both was
        called more than once, and a recomputation brings it gradients beside those that its graph brings."""
        whole: ExecutionInterval[U] = cls()
        unseen: dict[U, int] = {}
        for span in sorted(spans, key=lambda span: min(span.began.values(), default=0)):
            whole.again |= span.again | (span.began.keys() & whole.began.keys())
            whole.began = span.began | whole.began
            whole.ended |= span.ended
            whole.segments += span.segments
            for unit, inside in span.inside.items():
                whole.inside.setdefault(unit, []).extend(inside)
            unseen = span.unseen | unseen
        whole.unseen = {unit: began for unit, began in unseen.items() if unit in whole.began}
        whole.again |= whole.unseen.keys()
        whole.began |= {unit: min(began, whole.began[unit]) for unit, began in whole.unseen.items()}
        whole.began = dict(sorted(whole.began.items(), key=lambda item: item[1]))
        return whole

    @property
    def due(self) -> Mapping[U, int]:
        """When the gathers of units are due that `ended`."""
        segments = sorted(self.segments, key=lambda segment: segment.ended)
        if not segments:
            return self.ended
        due = dict(self.ended)
        in_order = sorted(due, key=due.__getitem__)
        ends = [due[unit] for unit in in_order]
        for segment in segments:  # one that is around others ended last
            inside = slice(bisect_right(ends, segment.began), bisect_left(ends, segment.ended))
            due.update(dict.fromkeys(in_order[inside], segment.ended))
        return due


class ForwardRecord(Generic[U]):
    """Which units ran in the forward passes that one backward may cover.

    Attributes:
        running: the pass that runs, if one does.
        begun_again: units that began more than once, at least the last time without a graph, and those that were lent
            without one.
        entered_at: when a unit was entered last.
        consumed: a backward has begun: the next forward opens a new record.
    """

    def __init__(self) -> None:
        self._entered: dict[U, None] = {}  # in the order of first entry
        self._begun: dict[U, int] = {}  # when, with those that began without a graph among them
        self.begun_again: set[U] = set()
        # What is recomputed with those that had no graph, and the segments in which they run again without one, the
        # innermost first.
        self._left: dict[U, list[tuple[CheckpointRegion, Sequence[CheckpointRegion]]]] = {}
        self._without_graph: dict[U, CheckpointRegion] = {}  # the first of these, of those that run
        self._checkpoint: int | None = None  # the reentrant one in which a unit ran last
        self._repeated = CheckpointRegion(0)  # what ran in it
        self.entered_at = 0
        self.running: ForwardPass | None = None
        self._spans: weakref.WeakKeyDictionary[ForwardPass, ExecutionInterval[U]] = weakref.WeakKeyDictionary()
        self._now: ExecutionInterval[U] = ExecutionInterval()  # of the pass that ran last
        self._inside: dict[U, CheckpointRegion] = {}  # units that were entered last in one
        self._clock = 0
        self._anchored: dict[U, None] = {}  # last anchoring; dict order = order of last anchoring
        self.consumed = False

    def begin(self) -> None:
        """A pass begins."""
        self.running = ForwardPass()
        self._now = self._spans[self.running] = ExecutionInterval()

    def end(self) -> None:
        """The pass has ended."""
        self.running = None

    def enter(
        self, unit: U, *, segment: object | None = None, segments: Callable[[], Sequence[object]] = tuple
    ) -> None:
        """`unit` began its forward, in a `segment` if there is one; `segments` are this one and those around it, the
        innermost first, maybe without the first, which is none then."""
        now = self.entered_at = self._clock = self._clock + 1
        if segment is not None or self._inside:
            self._enter_segment(unit, segment, segments)
        self._begun.setdefault(unit, now)
        self._entered.setdefault(unit)
        if self._now.began.setdefault(unit, now) != now:
            self._now.again.add(unit)

    def _enter_segment(self, unit: U, segment: object | None, segments: Callable[[], Sequence[object]]) -> None:
        if segment is not None:
            now = self._now
            inside = now.known.get(segment)
            for each in () if inside is not None else reversed(segments()):
                found = now.known.get(each)
                if found is None:
                    found = now.known[each] = CheckpointRegion(self._clock, around=inside)
                    now.segments.append(found)
                inside = found
            if inside is not None:
                self._inside[unit] = inside
                now.inside.setdefault(unit, []).append(inside)
                return
        if self._inside:
            self._inside.pop(unit, None)

    def enter_without_graph(
        self,
        unit: U,
        *,
        checkpoint: int | None = None,
        segment: object | None = None,
        segments: Callable[[], Sequence[object]] = tuple,
    ) -> None:
        """`unit` began its forward; a recomputation may still make its graph, and does where it is in a reentrant
        `checkpoint`, for which that stands. For the others see `enter`."""
        if unit in self._begun:
            self.begun_again.add(unit)
        self._tick(unit)
        self._enter_segment(unit, segment, segments)
        if checkpoint is None or checkpoint != self._checkpoint:
            self._repeated = CheckpointRegion(self._clock)
        self._checkpoint = checkpoint
        self._without_graph[unit] = self._repeated
        if checkpoint is not None:
            self._now.unseen.setdefault(unit, self._clock)

    def leave_without_graph(self, unit: U) -> None:
        """`unit` finished its forward, and no gradient can come to it unless it is recomputed."""
        self._clock += 1
        together = self._without_graph.pop(unit, None) or CheckpointRegion(self._clock)
        together.ended = self._clock
        self._left.setdefault(unit, []).append((together, self._leave_segments(unit)))

    def enter_sharing(self, owning_unit: U) -> None:
        """Parameters of `owning_unit` are about to be used by another unit, in whose backward it takes part."""
        self._entered.setdefault(owning_unit)
        self._now.began.setdefault(owning_unit, self._tick(owning_unit))

    def enter_sharing_without_graph(self, owning_unit: U) -> None:
        """Parameters of `owning_unit` are about to be used by a unit that began without a graph: gradients may come to
        them from two recomputations, of that unit and of `owning_unit`, or from one beside a graph."""
        self._now.began.setdefault(owning_unit, self._tick(owning_unit))
        self._now.again.add(owning_unit)
        self.begun_again.add(owning_unit)

    def _tick(self, unit: U) -> int:
        self._clock += 1
        self._begun.setdefault(unit, self._clock)
        return self._clock

    def add(self, unit: U) -> None:
        """`unit` takes part, though it did not run: parameters of it were used at a time that is not known."""
        self._tick(unit)
        self._entered.setdefault(unit)
        self._anchored.pop(unit, None)
        self._anchored[unit] = None

    @property
    def may_recompute(self) -> bool:
        """Whether units ran without a graph, which recomputations may still make."""
        return len(self._begun) > len(self._entered)

    def repeat(self, unit: U) -> None:
        """`unit` runs again, beside units that a backward gathers with it."""
        self._now.again.add(unit)

    def leave(self, unit: U) -> None:
        """`unit` finished its forward and its output can bring it a gradient."""
        self._anchored.pop(unit, None)
        self._anchored[unit] = None
        self._clock += 1
        self._now.ended[unit] = self._clock
        if self._inside:
            self._leave_segments(unit)

    def _leave_segments(self, unit: U) -> Sequence[CheckpointRegion]:
        found, inside = [], self._inside.get(unit)
        while inside is not None:
            inside.ended = self._clock
            found.append(inside)
            inside = inside.around
        return found

    def position(self, unit: U) -> int:
        """When `unit` first began; it has a graph from now on, if it had none (a recomputation)."""
        self._entered.setdefault(unit)
        return self._begun[unit] if unit in self._begun else self._tick(unit)

    def began(self, unit: U) -> int:
        """When `unit`, which has run, first began."""
        return self._begun[unit]

    def left(self, unit: U, *, later: int = 0) -> int:
        """When all had finished that a reentrant checkpoint recomputes with `unit`, which ran without a graph, so many
        times before it did last; 0 if it never did."""
        left = self._left.get(unit, ())
        return left[max(0, len(left) - 1 - later)][0].ended if left else 0

    def left_in(self, unit: U, *, later: int = 0) -> Sequence[CheckpointRegion]:
        """The segments in which that run of it is repeated without a graph before it gets one, the innermost first."""
        left = self._left.get(unit, ())
        return left[max(0, len(left) - 1 - later)][1] if left else ()

    @property
    def span(self) -> ExecutionInterval[U]:
        """When units ran in the passes that a backward may reach, since their graphs live."""
        spans = list(self._spans.values())
        return spans[0] if len(spans) == 1 and not spans[0].unseen else ExecutionInterval.around(spans)

    def awaits(self, unit: U) -> bool:
        """Whether a gradient can reach `unit` in a backward that has not begun."""
        return unit in self._anchored and not self.consumed

    @property
    def entered(self) -> tuple[U, ...]:
        """Units in the order in which they began."""
        return tuple(self._entered)

    @property
    def begun(self) -> tuple[U, ...]:
        """The same, with those that have no graph, or not yet."""
        return tuple(self._begun)

    @property
    def anchored(self) -> tuple[U, ...]:
        """Units that await a gradient, in the order in which they (last) finished."""
        return tuple(self._anchored)

    @property
    def empty(self) -> bool:
        """Whether nothing was anchored: no backward can follow."""
        return not self._anchored


Cut = Callable[[Iterable[U]], Iterable[tuple[U, ...]]]


def _apart(units: Iterable[U]) -> Iterable[tuple[U, ...]]:
    return ((unit,) for unit in units)


class GatherOrder(Generic[U]):
    """The gathers of one backward: hands out, for the unit that is needed now, all groups of units whose turn comes
    first.

    Attributes:
        is_over: whether all was handed out.
    """

    def __init__(
        self,
        anchored: tuple[U, ...],
        targets: Mapping[U, Sequence[U]] = MappingProxyType({}),
        *,
        coalesce: Cut[U] = _apart,
        together: Mapping[U, Sequence[U]] = MappingProxyType({}),
    ) -> None:
        """`targets`: what is gathered right after a unit, where that is not left to the plan; others are none of it.
        `coalesce` cuts the sequence into groups. `together`: units that are gathered when one of them is needed."""
        backwards = dict.fromkeys(reversed(anchored))
        sequence: dict[U, None] = {}
        for unit in backwards:
            sequence.setdefault(unit)
            for target in targets.get(unit, ()):
                if target in backwards:
                    sequence.setdefault(target)
        self._groups = tuple(coalesce(sequence))
        self._position = {unit: i for i, group in enumerate(self._groups) for unit in group}
        self._coalesced = together
        self._next = 0
        self.is_over = not self._groups

    def until(self, unit: U) -> Sequence[tuple[U, ...]]:
        """The groups to gather, in order, so that `unit` may be gathered; just `unit` where the plan is past it or
        lacks it."""
        was_past = self._position.get(unit, -1) < self._next
        due = self.through((unit,))
        return (*due, (unit,)) if was_past else due

    def is_past(self, unit: U) -> bool:
        """Whether the group of `unit` was handed out, and of all that are gathered with it."""
        if unit not in self._coalesced:
            return self._position.get(unit, self._next) < self._next
        return all(self._position.get(each, self._next) < self._next for each in self._coalesced[unit])

    def through(self, units: Iterable[U]) -> Sequence[tuple[U, ...]]:
        """The groups to gather, in order, so that all of `units` are gathered that the plan is not past."""
        if self._coalesced:
            units = [each for unit in units for each in self._coalesced.get(unit, (unit,))]
        last = max([self._position.get(unit, -1) for unit in units], default=-1)
        due = self._groups[self._next : last + 1]
        self._next += len(due)
        self.is_over = self._next == len(self._groups)
        return due

    def has_turn(self, unit: U) -> bool:
        """Whether the plan gathers `unit`, and has not yet."""
        return self._position.get(unit, -1) >= self._next

    def ahead(self, unit: U) -> Sequence[tuple[U, ...]]:
        """The next group of the plan, now handed out, unless one after the group of `unit` is already; none at the
        end."""
        due = self._upcoming(unit)
        self._next += len(due)
        self.is_over = self._next == len(self._groups)
        return due

    def following(self, unit: U) -> Iterator[U]:
        """The units that `ahead` would hand out."""
        return itertools.chain.from_iterable(self._upcoming(unit))

    def _upcoming(self, unit: U) -> Sequence[tuple[U, ...]]:
        return (
            () if self._position.get(unit, self._next) < self._next - 1 else self._groups[self._next : self._next + 1]
        )


class ReduceOrder(Generic[U]):
    """The reductions of one backward: a unit goes when it is ready and none that was entered later is outstanding.

    Units that are joined go together, when all of them are ready.
    """

    def __init__(self, record: ForwardRecord[U]) -> None:
        self._record = record
        self._coalesced: dict[U, tuple[U, ...]] = {}
        self._outstanding: dict[U, int] = {}
        self._in_order: list[U] | None = []  # the outstanding, the next last; None when it has to be sorted anew
        self._ready: set[U] = set()

    def expect(self, unit: U) -> None:
        """`unit` will have a reduction (again, if it had one)."""
        if unit not in self._outstanding:
            self._outstanding[unit] = self._record.position(unit)
            self._in_order = None

    def expects(self, unit: U) -> bool:
        """Whether a reduction of `unit` is outstanding."""
        return unit in self._outstanding

    def ready(self, unit: U) -> None:
        """All gradients that `unit` expects have arrived."""
        if unit not in self._outstanding:
            self.expect(unit)
        self._ready.add(unit)

    def coalesce(self, cut: Cut[U]) -> None:
        """Cut what is expected so far into groups; later expectations are none of them."""
        for group in cut(reversed(self._sorted())):
            if len(group) > 1:
                self._coalesced.update(dict.fromkeys(group, group))

    def outstanding(self) -> Iterator[U]:
        """What is expected and was not handed out, the next first."""
        return reversed(self._sorted())

    def at_the_end(self) -> tuple[U, ...]:
        """The last group of what is expected so far."""
        in_order = self._sorted()
        return (self._coalesced.get(in_order[0]) or (in_order[0],)) if in_order else ()

    def due(self) -> list[tuple[U, ...]]:
        """The groups whose turn has come, in order; each is handed out once."""
        out = []
        while (group := self._following()) and self._ready.issuperset(group):
            out.append(self._hand_out(group))
        return out

    @property
    def last(self) -> U | None:
        """The only unit that is outstanding; None where there are several, or none."""
        return next(iter(self._outstanding)) if len(self._outstanding) == 1 else None

    def rest(self) -> list[tuple[U, ...]]:
        """All that is outstanding in order, ready or not: the flush at the end of a backward."""
        out = []
        while group := self._following():
            out.append(self._hand_out(group))
        return out

    def _following(self) -> tuple[U, ...]:
        in_order = self._sorted()
        if not in_order:
            return ()
        unit = in_order[-1]
        return self._coalesced.get(unit) or (unit,)

    def _sorted(self) -> list[U]:
        if self._in_order is None:
            self._in_order = sorted(self._outstanding, key=self._outstanding.__getitem__)
        return self._in_order

    def _hand_out(self, group: tuple[U, ...]) -> tuple[U, ...]:
        if self._in_order is not None and len(group) == 1:
            self._in_order.pop()
        else:
            self._in_order = None
        for unit in group:
            del self._outstanding[unit]
            self._ready.discard(unit)
            self._coalesced.pop(unit, None)
        return group


class ForwardOrder(Generic[U]):
    """The order of units in the running forward, and in the last complete one, from which this one prefetches.

    A unit that is entered several times has a follower for each.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[U, int], U] = {}  # (unit, which visit of it) -> what followed
        self._learned: dict[tuple[U, int], U] = {}
        self._visits: dict[U, int] = {}
        self._now: tuple[U, int] | None = None

    def begin(self) -> None:
        """A forward begins."""
        self._learned = {}
        self._visits = {}
        self._now = None

    def enter(self, unit: U) -> bool:
        """`unit` is entered; True if it is the first one."""
        first = self._now is None
        if self._now is not None:
            self._learned[self._now] = unit
        visit = self._visits[unit] = self._visits.get(unit, 0) + 1
        self._now = unit, visit
        return first

    def end(self) -> None:
        """The forward is complete."""
        self._known = self._learned

    def upcoming(self) -> Iterator[U]:
        """What followed, in the last complete forward, that visit of the unit that was entered last: one unit after the
        other, until one comes again."""
        now = self._now
        visits = dict([now] if now is not None else [])
        while now is not None and (unit := self._known.get(now)) is not None and unit not in visits:
            visits[unit] = self._visits.get(unit, 0) + 1
            yield unit
            now = unit, visits[unit]
