"""The turns of units that run or not, and in which order, depending on a rank's data; pure.

[Note: conditional units] A *branch* is a part of a model whose units a rank runs as its data will have it: the tower
for images, the experts of a mixture. All ranks take part in it all the same, at one place of the forward, whatever the
data: within the forward of the unit *around* the branch, after what was registered before it, and before the next unit
that every rank runs. Where it is a rank's *turn* with a unit that it does not run, it gathers and frees it. In a branch
in order each unit has a turn of its own; a rank that enters one has first taken its turn with those that it passed
over. A branch in any order has one turn for all of its units, which are then there until the branch is over.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)
Place = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Branch:
    """One branch, as the units in it know it.

    Attributes:
        any_order: whether units may run in any order, and again.
    """

    any_order: bool = False

    def __str__(self) -> str:
        return "in any order" if self.any_order else "in order"


@dataclass(frozen=True, eq=False)
class ParticipationSlot(Generic[U]):
    """What all ranks do together at one place of a forward.

    Attributes:
        around: the unit in whose forward it is.
        units: what is gathered, outer units before those inside: one unit, or all of a branch in any order.
    """

    position: Place
    around: U
    units: tuple[U, ...]
    any_order: bool


class ParticipationPlan(Generic[U]):
    """Where the units of a model have their places, and which turns there are.

    Attributes:
        slot: of each unit of a branch.
        position: of every unit.
    """

    def __init__(
        self, nesting: Iterable[tuple[U, U | None]], branches: Mapping[U, Branch], before: Mapping[U, U]
    ) -> None:
        """`nesting`: every unit with the one around it, in the order of registration, outer units first. `before`:
        units of branches whose place is right before another unit's, in place of their own."""
        self._around = dict(nesting)
        own = {unit: i for i, unit in enumerate(self._around)}
        self.position: dict[U, Place] = {
            unit: (own[before[unit]], 0, i) if unit in before else (i, 1, 0) for unit, i in own.items()
        }
        members: dict[object, list[U]] = {}
        for unit in self._around:
            if (branch := branches.get(unit)) is not None:
                members.setdefault(branch if branch.any_order else unit, []).append(unit)
        self.slot: dict[U, ParticipationSlot[U]] = {}
        self._slots: dict[U, list[ParticipationSlot[U]]] = {}
        for units in members.values():
            around = self._around[units[0]]
            if around is None:
                continue
            slot = ParticipationSlot(self.position[units[0]], around, tuple(units), branches[units[0]].any_order)
            self.slot.update(dict.fromkeys(units, slot))
            self._slots.setdefault(around, []).append(slot)
        for slots in self._slots.values():
            slots.sort(key=lambda slot: slot.position)

    def is_inside(self, unit: U, around: U) -> bool:
        """Whether `unit` is somewhere inside `around`."""
        found = self._around.get(unit)
        while found is not None and found is not around:
            found = self._around.get(found)
        return found is around

    def cursor(self, unit: U) -> ParticipationCursor[U]:
        """A forward of `unit` begins."""
        return ParticipationCursor(unit, tuple(self._slots.get(unit, ())))


class ParticipationCursor(Generic[U]):
    """How far one running forward of a unit has come past the turns in it.

    Attributes:
        open: the turn with a branch in any order that has begun and is not over.
    """

    def __init__(self, unit: U, slots: tuple[ParticipationSlot[U], ...]) -> None:
        self.unit = unit
        self.open: ParticipationSlot[U] | None = None
        self._slots = slots
        self._taken = 0

    def has_passed(self, slot: ParticipationSlot[U]) -> bool:
        """Whether it cannot be this turn any more, or is none of this forward."""
        return slot not in self._slots[self._taken :]

    def next_before(self, position: Place | None) -> ParticipationSlot[U] | None:
        """The next turn, if it comes before `position` (None: the end of the forward)."""
        if self._taken == len(self._slots):
            return None
        slot = self._slots[self._taken]
        return slot if position is None or slot.position < position else None

    def take(self, slot: ParticipationSlot[U]) -> None:
        """It is this turn, the next one."""
        assert self._slots[self._taken] is slot
        self._taken += 1
        self.open = slot if slot.any_order else None
