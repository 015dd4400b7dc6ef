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

from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)


class ForwardRecord(Generic[U]):
    """Which units ran in the forward passes that one backward may cover."""

    def __init__(self) -> None:
        self._entered: dict[U, int] = {}  # first entry; dict order = order of first entry
        self._again: set[U] = set()  # entered more than once
        self._anchored: dict[U, None] = {}  # last anchoring; dict order = order of last anchoring
        self.consumed = False  # a backward has begun: the next forward opens a new record

    def enter(self, unit: U) -> None:
        """`unit` began its forward."""
        if unit in self._entered:
            self._again.add(unit)
        else:
            self._entered[unit] = len(self._entered)

    def anchor(self, unit: U) -> None:
        """`unit` finished its forward and its output can bring it a gradient."""
        self._anchored.pop(unit, None)
        self._anchored[unit] = None

    def position(self, unit: U) -> int:
        """The position at which `unit` was first entered; entering it now if it was not (a recomputation)."""
        return self._entered.setdefault(unit, len(self._entered))

    def entered_once(self, unit: U) -> bool:
        """Whether one call of `unit` is all that a backward can reach."""
        return unit in self._entered and unit not in self._again

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


class GatherPlan(Generic[U]):
    """The gathers of one backward: hands out, for the unit that is needed now, all units whose turn comes first."""

    def __init__(self, anchored: tuple[U, ...], targets: Mapping[U, Sequence[U]] = MappingProxyType({})) -> None:
        """`targets`: what is gathered right after a unit, where that is not left to the plan; others are none of it."""
        backwards = dict.fromkeys(reversed(anchored))
        sequence: dict[U, None] = {}
        for unit in backwards:
            sequence.setdefault(unit)
            for target in targets.get(unit, ()):
                if target in backwards:
                    sequence.setdefault(target)
        self._sequence = tuple(sequence)
        self._position = {unit: i for i, unit in enumerate(self._sequence)}
        self._next = 0

    def until(self, unit: U) -> tuple[U, ...]:
        """The units to gather, in order, so that `unit` may be gathered; just `unit` where the plan is past it or lacks
        it."""
        return self.through([unit]) or (unit,)

    def through(self, units: Iterable[U]) -> tuple[U, ...]:
        """The units to gather, in order, so that all of `units` are gathered that the plan is not past."""
        last = max((self._position.get(unit, -1) for unit in units), default=-1)
        due = self._sequence[self._next : last + 1]
        self._next = max(self._next, last + 1)
        return due

    def ahead(self) -> U | None:
        """The next unit of the plan, now handed out; None at its end."""
        if self._next >= len(self._sequence):
            return None
        unit = self._sequence[self._next]
        self._next += 1
        return unit


class ReducePlan(Generic[U]):
    """The reductions of one backward: a unit goes when it is ready and none that was entered later is outstanding."""

    def __init__(self, record: ForwardRecord[U]) -> None:
        self._record = record
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
        self.expect(unit)
        self._ready.add(unit)

    def due(self) -> list[U]:
        """The units whose turn has come, in order; each is handed out once."""
        out = []
        in_order = self._sorted()
        while in_order and in_order[-1] in self._ready:
            out.append(self._hand_out(in_order))
        return out

    @property
    def last(self) -> U | None:
        """The only unit that is outstanding; None where there are several, or none."""
        return next(iter(self._outstanding)) if len(self._outstanding) == 1 else None

    def rest(self) -> list[U]:
        """All outstanding units in order, ready or not: the flush at the end of a backward."""
        in_order = self._sorted()
        return [self._hand_out(in_order) for _ in range(len(in_order))]

    def _sorted(self) -> list[U]:
        if self._in_order is None:
            self._in_order = sorted(self._outstanding, key=self._outstanding.__getitem__)
        return self._in_order

    def _hand_out(self, in_order: list[U]) -> U:
        unit = in_order.pop()
        del self._outstanding[unit]
        self._ready.discard(unit)
        return unit


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

    @property
    def following(self) -> U | None:
        """What followed the last complete forward's visit of the unit that was entered last, None where unknown."""
        return self._known.get(self._now) if self._now is not None else None
