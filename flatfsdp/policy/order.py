"""The order of a backward's collectives, as a pure function of the order of the forward.

[Note: backward order] Ranks may run different autograd graphs (a parameter unused here, a branch there), so the moment
at which a unit's backward begins or its last gradient arrives is no common order. What ranks do share is the order of
the forward.
Hence: *gathers* of a backward are issued in the reverse of the order in which units finished their forward, and
*reductions* in the reverse of the order in which units began it; each on a communicator of its own, so the two
sequences need no common interleaving. A unit that is ready before its turn waits; at the end of the backward all that
remain are flushed in order. In a model that is nested like a tree, ready means on turn, and nobody waits.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)


class Pass:
    """One forward of a model; it lives as long as the graph that was made in it."""

    __slots__ = ("__weakref__",)


class ForwardRecord(Generic[U]):
    """Which units ran in the forward passes that one backward may cover.

    Attributes:
        running: the pass that runs, if one does.
        entered_again: units that were entered more than once.
        consumed: a backward has begun: the next forward opens a new record.
    """

    def __init__(self) -> None:
        self._entered: dict[U, int] = {}  # first entry; dict order = order of first entry
        self._begun: dict[U, int] = {}  # as `_entered`, with those that began without a graph among them
        self.entered_again: set[U] = set()
        self.running: Pass | None = None
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self._entered_now: set[U] = set()  # in the pass that ran last
        self._loops = False  # a unit was entered more than once in one pass
        self._anchored: dict[U, None] = {}  # last anchoring; dict order = order of last anchoring
        self.consumed = False

    def begin(self) -> None:
        """A pass begins."""
        self.running = Pass()
        self._passes.add(self.running)
        self._entered_now.clear()

    def end(self) -> None:
        """The pass has ended."""
        self.running = None

    def enter(self, unit: U) -> None:
        """`unit` began its forward."""
        self.enter_without_graph(unit)
        self._loops = self._loops or unit in self._entered_now
        self._entered_now.add(unit)
        if unit in self._entered:
            self.entered_again.add(unit)
        else:
            self._entered[unit] = len(self._entered)

    def enter_without_graph(self, unit: U) -> None:
        """`unit` began its forward; a recomputation may still make its graph."""
        self._begun.setdefault(unit, len(self._begun))

    def began_later(self, unit: U, than: U) -> bool:
        """Whether `unit` began after another one, as far as that is known."""
        return than not in self._begun or self._begun.get(unit, -1) > self._begun[than]

    @property
    def may_recompute(self) -> bool:
        """Whether units ran without a graph, which recomputations may still make."""
        return len(self._begun) > len(self._entered)

    def repeat(self, unit: U) -> None:
        """`unit` runs again, beside units that a backward gathers with it."""
        self.entered_again.add(unit)

    def anchor(self, unit: U) -> None:
        """`unit` finished its forward and its output can bring it a gradient."""
        self._anchored.pop(unit, None)
        self._anchored[unit] = None

    def position(self, unit: U) -> int:
        """The position at which `unit` was first entered; entering it now if it was not (a recomputation)."""
        return self._entered.setdefault(unit, len(self._entered))

    def entered_once(self, unit: U) -> bool:
        """Whether one call of `unit` is all that a backward can reach."""
        return unit in self._entered and unit not in self.entered_again

    @property
    def calls_again(self) -> bool:
        """Whether a backward may reach several calls of units: of several passes whose graphs live, or of one."""
        return self._loops or len(self._passes) > 1

    def awaits(self, unit: U) -> bool:
        """Whether a gradient can reach `unit` in a backward that has not begun."""
        return unit in self._anchored and not self.consumed

    @property
    def entered(self) -> tuple[U, ...]:
        """Units in the order in which they began."""
        return tuple(self._entered)

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


class GatherPlan(Generic[U]):
    """The gathers of one backward: hands out, for the unit that is needed now, all groups of units whose turn comes
    first."""

    def __init__(
        self,
        anchored: tuple[U, ...],
        targets: Mapping[U, Sequence[U]] = MappingProxyType({}),
        *,
        join: Cut[U] = _apart,
        together: Mapping[U, Sequence[U]] = MappingProxyType({}),
    ) -> None:
        """`targets`: what is gathered right after a unit, where that is not left to the plan; others are none of it.
        `join` cuts the sequence into groups. `together`: units that are gathered when one of them is needed."""
        backwards = dict.fromkeys(reversed(anchored))
        sequence: dict[U, None] = {}
        for unit in backwards:
            sequence.setdefault(unit)
            for target in targets.get(unit, ()):
                if target in backwards:
                    sequence.setdefault(target)
        self._groups = tuple(join(sequence))
        self._position = {unit: i for i, group in enumerate(self._groups) for unit in group}
        self._together = together
        self._next = 0

    def until(self, unit: U) -> Sequence[tuple[U, ...]]:
        """The groups to gather, in order, so that `unit` may be gathered; just `unit` where the plan is past it or
        lacks it."""
        was_past = self._position.get(unit, -1) < self._next
        due = self.through((unit,))
        return (*due, (unit,)) if was_past else due

    def is_past(self, unit: U) -> bool:
        """Whether the group of `unit` was handed out, and of all that are gathered with it."""
        if unit not in self._together:
            return self._position.get(unit, self._next) < self._next
        return all(self._position.get(each, self._next) < self._next for each in self._together[unit])

    @property
    def is_over(self) -> bool:
        """Whether all was handed out."""
        return self._next == len(self._groups)

    def through(self, units: Iterable[U]) -> Sequence[tuple[U, ...]]:
        """The groups to gather, in order, so that all of `units` are gathered that the plan is not past."""
        if self._together:
            units = [each for unit in units for each in self._together.get(unit, (unit,))]
        last = max([self._position.get(unit, -1) for unit in units], default=-1)
        due = self._groups[self._next : last + 1]
        self._next = max(self._next, last + 1)
        return due

    def has_turn(self, unit: U) -> bool:
        """Whether the plan gathers `unit`, and has not yet."""
        return self._position.get(unit, -1) >= self._next

    def ahead(self, unit: U) -> Sequence[tuple[U, ...]]:
        """The next group of the plan, now handed out, unless one after the group of `unit` is already; none at the
        end."""
        if self._position.get(unit, self._next) < self._next - 1:
            return ()
        due = self._groups[self._next : self._next + 1]
        self._next += len(due)
        return due

    def following(self, unit: U) -> Iterator[U]:
        """The units that `ahead` would hand out."""
        before = self._next
        due = self.ahead(unit)
        self._next = before
        return itertools.chain.from_iterable(due)


class ReducePlan(Generic[U]):
    """The reductions of one backward: a unit goes when it is ready and none that was entered later is outstanding.

    Units that are joined go together, when all of them are ready.
    """

    def __init__(self, record: ForwardRecord[U]) -> None:
        self._record = record
        self._joined: dict[U, tuple[U, ...]] = {}
        self._outstanding: dict[U, int] = {}
        self._in_order: list[U] | None = []  # the outstanding, the next last; None when it has to be sorted anew
        self._ready: set[U] = set()

    def expect(self, unit: U) -> None:
        """`unit` will have a reduction (again, if it had one)."""
        if unit not in self._outstanding:
            self._outstanding[unit] = self._record.position(unit)
            self._in_order = None

    def ready(self, unit: U) -> None:
        """All gradients that `unit` expects have arrived."""
        if unit not in self._outstanding:
            self.expect(unit)
        self._ready.add(unit)

    def join(self, cut: Cut[U]) -> None:
        """Cut what is expected so far into groups; later expectations are none of them."""
        for group in cut(reversed(self._sorted())):
            if len(group) > 1:
                self._joined.update(dict.fromkeys(group, group))

    def outstanding(self) -> Iterator[U]:
        """What is expected and was not handed out, the next first."""
        return reversed(self._sorted())

    @property
    def next(self) -> U | None:
        """What is expected and was not handed out, and comes first."""
        in_order = self._sorted()
        return in_order[-1] if in_order else None

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
        return self._joined.get(unit) or (unit,)

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
            self._joined.pop(unit, None)
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
