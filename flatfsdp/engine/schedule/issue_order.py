"""The order in which the collectives of one backward are issued, and those that are due; pure.

Why all ranks have the same order: [Note: backward order].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeVar

from .forward_schedule import ForwardRecord

U = TypeVar("U", bound=Hashable)
Cut = Callable[[Iterable[U]], Iterable[tuple[U, ...]]]


class GatherOrder(Generic[U]):
    """The gathers of one backward: for the unit that is needed now, all groups of units whose turn comes first, each
    returned once.

    Attributes:
        is_over: whether all groups were returned.
    """

    def __init__(
        self,
        anchored: Sequence[U],
        targets: Mapping[U, Sequence[U]] = MappingProxyType({}),
        *,
        coalesce: Cut[U] | None = None,
        together: Mapping[U, Sequence[U]] = MappingProxyType({}),
        due: Mapping[U, float] = MappingProxyType({}),
    ) -> None:
        """`targets`: units to gather right after a unit, instead of in the plan's order, if they are anchored.
        `coalesce` splits the sequence into groups. `together`: units that are gathered when one of them is needed.
        `due`: the ticks at which gathers are due, the last of `anchored` first."""
        backwards = dict.fromkeys(reversed(anchored))
        self._due, self._sequence = due, (*backwards,)
        self._passed = 0  # the number of gathers in this sequence that were due so far
        sequence: dict[U, None] = {}
        for unit in backwards:
            sequence.setdefault(unit)
            for target in targets.get(unit, ()):
                if target in backwards:
                    sequence.setdefault(target)
        self._groups = tuple(coalesce(sequence) if coalesce is not None else zip(sequence))
        self._position = {unit: i for i, group in enumerate(self._groups) for unit in group}
        self._coalesced = together
        self._next = 0
        self.is_over = not self._groups

    def until(self, unit: U) -> Sequence[tuple[U, ...]]:
        """The groups to gather, in order, for `unit`; only `unit` if the plan has passed it or does not contain it."""
        was_past = self._position.get(unit, -1) < self._next
        due = self.through((unit,))
        return (*due, (unit,)) if was_past else due

    def is_past(self, unit: U) -> bool:
        """Whether the groups of `unit` and of all units that are gathered with it were returned."""
        if unit not in self._coalesced:
            return self._position.get(unit, self._next) < self._next
        return all(self._position.get(each, self._next) < self._next for each in self._coalesced[unit])

    def through(self, units: Iterable[U], *, ahead: bool = False) -> Sequence[tuple[U, ...]]:
        """The groups to gather, in order, for all of `units` that the plan has not passed. `ahead`: a prefetch; units
        that are needed with them are gathered before their use."""
        if self._coalesced and not ahead:
            units = [each for unit in units for each in self._coalesced.get(unit, (unit,))]
        count = max([self._position.get(unit, -1) for unit in units], default=-1) + 1
        due = self._groups[self._next : count]
        self._next += len(due)
        self.is_over = self._next == len(self._groups)
        return due

    def has_turn(self, unit: U) -> bool:
        """Whether the plan contains `unit`, and has not passed it."""
        return self._position.get(unit, -1) >= self._next

    def ahead(self, unit: U) -> Sequence[tuple[U, ...]]:
        """The next group of the plan; none at the end, or if one after the group of `unit` was returned already."""
        if self._position.get(unit, -1) < self._next - 1:
            return ()
        due = self._groups[self._next : self._next + 1]
        self._next += len(due)
        self.is_over = self._next == len(self._groups)
        return due

    def following(self, unit: U) -> Sequence[U]:
        """The units that `ahead` would return."""
        if self._position.get(unit, self._next) < self._next - 1 or self.is_over:
            return ()
        return self._groups[self._next]

    def due_before(self, tick: float) -> Sequence[tuple[U, ...]]:
        """The groups to gather, in order, so that all units are gathered that are due before this tick."""
        count, due, sequence = 0, self._due, self._sequence
        while self._passed < len(sequence) and due.get(sequence[self._passed], math.inf) > tick:
            unit = sequence[self._passed]
            for each in self._coalesced.get(unit, (unit,)) if self._coalesced else (unit,):
                count = max(count, self._position.get(each, -1) + 1)
            self._passed += 1
        groups = self._groups[self._next : count]
        self._next += len(groups)
        self.is_over = self._next == len(self._groups)
        return groups


class ReduceOrder(Generic[U]):
    """The reductions of one backward: a unit is due when it is ready and no unit that began later is outstanding.

    Coalesced units are due together, when all of them are ready.

    Attributes:
        expected: units that were not returned by `due`, with the ticks at which they began.
    """

    def __init__(self, record: ForwardRecord[U]) -> None:
        self._record = record
        self._coalesced: dict[U, tuple[U, ...]] = {}
        self.expected: dict[U, int] = {}
        self._in_order: list[U] | None = []  # the outstanding units, the next one last; None when it must be sorted
        self._ready: set[U] = set()

    def expect(self, *units: U) -> None:
        """Expect a reduction of each of `units` (another one if it had one)."""
        new = [unit for unit in units if unit not in self.expected]
        if new:
            self.expected.update(zip(new, self._record.positions(new), strict=True))
            self._in_order = None

    def ready(self, unit: U) -> None:
        """Record that all expected gradients of `unit` have arrived."""
        if unit not in self.expected:
            self.expect(unit)
        self._ready.add(unit)

    def coalesce(self, cut: Cut[U]) -> None:
        """Split the units that are expected so far into groups; units that are expected later join none of them."""
        for group in cut(self.outstanding()):
            if len(group) > 1:
                self._coalesced.update(dict.fromkeys(group, group))

    def outstanding(self) -> Iterator[U]:
        """The expected units that were not returned by `due`, the next one first."""
        return reversed(self._sorted())

    def at_the_end(self) -> tuple[U, ...]:
        """The last group of the units that are expected so far."""
        return self._group(in_order[0]) if (in_order := self._sorted()) else ()

    def due(self, *, flush: bool = False) -> list[tuple[U, ...]]:
        """The groups whose turn has come, in order; each is returned once. `flush`: all outstanding ones, ready or not:
        the flush at the end of a backward."""
        out: list[tuple[U, ...]] = []
        while in_order := self._in_order if self._in_order is not None else self._sorted():
            group = self._coalesced.get(in_order[-1]) or (in_order[-1],)
            if not (flush or self._ready.issuperset(group)):
                break
            out.append(group)
            for unit in group:
                del self.expected[unit]
                self._coalesced.pop(unit, None)
            self._ready.difference_update(group)
            if len(group) == 1:
                in_order.pop()
            else:
                self._in_order = None
        return out

    def _group(self, unit: U) -> tuple[U, ...]:
        return self._coalesced.get(unit) or (unit,)

    def _sorted(self) -> list[U]:
        if self._in_order is None:
            self._in_order = sorted(self.expected, key=self.expected.__getitem__)
        return self._in_order
