"""The turns of conditional units, whose execution and order depend on a rank's data; pure.

[Note: conditional units] A *branch* is a part of a model whose units a rank runs or not, depending on its data: the
tower for images, the experts of a mixture. All ranks take part in it regardless of their data, at one place of the
forward: within the forward of the unit *around* the branch, after the units registered before the branch, and before
the next unit that every rank runs. At its *turn* with a unit that it does not run, a rank gathers and frees it. In a
branch in order each unit has its own turn; before a rank enters a unit it takes the turns with those that it passed
over. A branch in any order has one turn for all of its units, which then stay unsharded until the branch is over.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)
Place = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Branch:
    """A branch, to which its units refer.

    Attributes:
        any_order: whether units may run in any order, and again.
    """

    any_order: bool = False

    def __str__(self) -> str:
        return "in any order" if self.any_order else "in order"


@dataclass(frozen=True, eq=False)
class ParticipationSlot(Generic[U]):
    """A turn: the gathers of conditional units that all ranks issue at one place of a forward.

    Attributes:
        around: the unit in whose forward it is.
        units: the units to gather, outer ones before inner ones: one unit, or all of a branch in any order.
    """

    position: Place
    around: U
    units: tuple[U, ...]
    any_order: bool


class ParticipationPlan(Generic[U]):
    """The positions of a model's units, and the turns of its conditional units.

    Attributes:
        slot: the turn of each conditional unit.
        position: the position of every unit.
    """

    def __init__(
        self, nesting: Iterable[tuple[U, U | None]], branches: Mapping[U, Branch], before: Mapping[U, U]
    ) -> None:
        """`nesting`: every unit with the one around it, in the order of registration, outer units first. `before`:
        for conditional units with another place than their own: the unit right after that place."""
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
        """A cursor for a forward of `unit` that begins."""
        return ParticipationCursor(unit, tuple(self._slots.get(unit, ())))


class ParticipationCursor(Generic[U]):
    """The progress of one running forward of a unit through the turns in it.

    Attributes:
        open: the turn of a branch in any order that has begun and is not over.
    """

    def __init__(self, unit: U, slots: tuple[ParticipationSlot[U], ...]) -> None:
        self.unit = unit
        self.open: ParticipationSlot[U] | None = None
        self._slots = slots
        self._taken = 0

    def has_passed(self, slot: ParticipationSlot[U]) -> bool:
        """Whether `slot` was taken already, or is not in this forward."""
        return slot not in self._slots[self._taken :]

    def next_before(self, position: Place | None) -> ParticipationSlot[U] | None:
        """The next turn, if it comes before `position` (None: the end of the forward)."""
        if self._taken == len(self._slots):
            return None
        slot = self._slots[self._taken]
        return slot if position is None or slot.position < position else None

    def take(self, slot: ParticipationSlot[U]) -> None:
        """Take `slot`, which is the next turn."""
        assert self._slots[self._taken] is slot
        self._taken += 1
        self.open = slot if slot.any_order else None
