"""The order in which the collectives of one backward are issued, and which may be now; pure. [Note: backward order]

[Note: coalescing] A collective costs the host about the same whatever it moves, so small units that follow each other
in the agreed order are gathered, and reduced, as one. How small is a number of bytes, which bounds what a group of them
has together, too: the staging buffer through which it travels, and the memory that is taken ahead of its use. Order and
sizes are what all ranks agree on, so they find the same groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeVar

from .forward_record import ForwardRecord

U = TypeVar("U", bound=Hashable)
Cut = Callable[[Iterable[U]], Iterable[tuple[U, ...]]]


class GatherOrder(Generic[U]):
    """The gathers of one backward: hands out, for the unit that is needed now, all groups of units whose turn comes
    first.

    Attributes:
        is_over: whether all was handed out.
        limit: how many groups may be handed out ahead: those that are due before what has no turn.
    """

    def __init__(
        self,
        anchored: Sequence[U],
        targets: Mapping[U, Sequence[U]] = MappingProxyType({}),
        *,
        coalesce: Cut[U] | None = None,
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
        self._groups = tuple(coalesce(sequence) if coalesce is not None else zip(sequence))
        self._position = {unit: i for i, group in enumerate(self._groups) for unit in group}
        self._coalesced = together
        self._next = 0
        self.limit = len(self._groups)
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

    def through(self, units: Iterable[U], *, ahead: bool = False) -> Sequence[tuple[U, ...]]:
        """The groups to gather, in order, so that all of `units` are gathered that the plan is not past; `ahead` of
        their use, before which others are gathered that are needed with them."""
        if self._coalesced and not ahead:
            units = [each for unit in units for each in self._coalesced.get(unit, (unit,))]
        count = max([self._position.get(unit, -1) for unit in units], default=-1) + 1
        due = self._groups[self._next : min(count, self.limit) if ahead else count]
        self._next += len(due)
        self.is_over = self._next == len(self._groups)
        return due

    def first(self, count: int) -> Sequence[tuple[U, ...]]:
        """So many groups, but for those that were handed out."""
        due = self._groups[self._next : count]
        self._next += len(due)
        self.is_over = self._next == len(self._groups)
        return due

    def due_after(self, due: Mapping[U, float], ticks: Iterable[float]) -> Iterator[int]:
        """For each of `ticks`, which ascend, how many groups are handed out before what is due then and has no turn."""
        count = len(self._groups)
        for tick in ticks:
            while count and all(due.get(unit, math.inf) <= tick for unit in self._groups[count - 1]):
                count -= 1
            yield count

    def has_turn(self, unit: U) -> bool:
        """Whether the plan gathers `unit`, and has not yet."""
        return self._position.get(unit, -1) >= self._next

    def ahead(self, unit: U, *, behind: int = 0) -> Sequence[tuple[U, ...]]:
        """The next group of the plan, now handed out, unless one after the group of `unit` is already, or, where it has
        no turn, after so many groups; none at the end."""
        due = self._upcoming(self._position.get(unit, behind - 1))
        self._next += len(due)
        self.is_over = self._next == len(self._groups)
        return due

    def following(self, unit: U) -> Iterator[U]:
        """The units that `ahead` would hand out."""
        return itertools.chain.from_iterable(self._upcoming(self._position.get(unit, self._next)))

    def _upcoming(self, last: int) -> Sequence[tuple[U, ...]]:
        return () if last < self._next - 1 else self._groups[self._next : min(self._next + 1, self.limit)]


class ReduceOrder(Generic[U]):
    """The reductions of one backward: a unit goes when it is ready and none that was entered later is outstanding.

    Units that are joined go together, when all of them are ready.

    Attributes:
        awaited: when a gather is due that has no turn: what began before waits for it.
    """

    def __init__(self, record: ForwardRecord[U], began: Mapping[U, int] = MappingProxyType({})) -> None:
        """`began`: when units did that this backward may reach."""
        self._record, self._began = record, began
        self.awaited = 0
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
        for group in cut(self.outstanding()):
            if len(group) > 1:
                self._coalesced.update(dict.fromkeys(group, group))

    def outstanding(self) -> Iterator[U]:
        """What is expected and was not handed out, the next first."""
        return reversed(self._sorted())

    def at_the_end(self) -> tuple[U, ...]:
        """The last group of what is expected so far."""
        return self._group(in_order[0]) if (in_order := self._sorted()) else ()

    @property
    def last(self) -> U | None:
        """The only unit that is outstanding; None where there are several, or none."""
        return next(iter(self._outstanding)) if len(self._outstanding) == 1 else None

    def due(self, *, rest: bool = False) -> list[tuple[U, ...]]:
        """The groups whose turn has come, in order; each is handed out once. `rest`: all that is outstanding, ready or
        not: the flush at the end of a backward."""
        out = []
        while in_order := self._sorted():
            group = self._group(in_order[-1])
            if not (rest or self._ready.issuperset(group)):
                break
            if self.awaited and not rest and min(map(self._when_began, group)) < self.awaited:
                break
            out.append(group)
            for unit in group:
                del self._outstanding[unit]
                self._coalesced.pop(unit, None)
            self._ready.difference_update(group)
            if len(group) == 1:
                in_order.pop()
            else:
                self._in_order = None
        return out

    def _when_began(self, unit: U) -> int:
        return self._began.get(unit, self._outstanding[unit])

    def _group(self, unit: U) -> tuple[U, ...]:
        return self._coalesced.get(unit) or (unit,)

    def _sorted(self) -> list[U]:
        if self._in_order is None:
            self._in_order = sorted(self._outstanding, key=self._outstanding.__getitem__)
        return self._in_order


def coalesce(
    sequence: Iterable[U], key: Callable[[U], tuple[int, object] | None], *, most: int
) -> Iterator[tuple[U, ...]]:
    """Cut `sequence` into groups of units that share their collectives; nothing is read beyond a group's end but one.

    Args:
        sequence: units in the order of their collectives.
        key: the bytes of a unit and what its group must have in common with it; None for one that stays alone.
        most: the bytes of a group.
    """
    group: list[U] = []
    common: object = None
    room = 0
    for unit in sequence:
        size, mine = key(unit) or (most, object())
        if group and (size > room or mine != common):
            yield tuple(group)
            group = []
        if not group:
            common, room = mine, most
        group.append(unit)
        room -= size
    if group:
        yield tuple(group)
