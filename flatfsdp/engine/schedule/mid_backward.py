"""How far the backwards of units are, by the gradients that have come; pure.

[Note: half-way] A backward that hides a gather and a reduction behind each unit needs three whole units at a time: the
one in use, the one ahead, and the one that is reduced. Two suffice where each hides behind half of a unit: while the
first half of its gradients come, the unit before is reduced; that lets go of what it reads, and while the other half
come, the next unit is gathered. The last unit that is gathered has none ahead, and computes alone: what is held is
highest then, since every unit leaves a shard of gradients behind, so the reduction before it is waited for where it is
issued. Units around others are whole beside them anyway: what they gather ahead is no third one, and is gathered when
their backwards begin. So it is for units that are recomputed reentrantly: ranks which lack some of their gradients
reduce them late.

Ranks need not agree on when half has come: what is gathered then is settled when the unit's backward begins, and is
next in the plan ([Note: backward order]). Only a gather that has no turn in the plan must find it at the same place on
all ranks: what awaits half of a unit that has begun is gathered before it. Nor do ranks wait for each other: gradients
of a unit come before those of units that began earlier, so every rank issues the reduction that is waited for before it
needs a gather that the waiting rank has not issued, and gathers that are due before a reduction are issued by then.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)


class HalfwayTrigger(Generic[U]):
    """Units whose backward has begun and is not half over. Half of a gradient's elements take half of its time."""

    def __init__(self) -> None:
        self._missing: dict[U, int] = {}  # elements of gradients until half of them have come
        self._following: dict[U, Sequence[U]] = {}

    def begin(self, unit: U, elements: int, following: Sequence[U]) -> None:
        """The backward of `unit` begins, which brings so many `elements` of gradients, if it brings all.

        `following`: what is gathered half-way.
        """
        self._missing[unit] = (elements + 1) // 2
        self._following[unit] = following

    def gradient_elements_arrived(self, unit: U, elements: int) -> Sequence[U]:
        """So many more have come: what is to be gathered, if half of all have for the first time."""
        missing = self._missing.get(unit)
        if missing is None:
            return ()
        self._missing[unit] = missing - elements
        return self.end(unit) if missing <= elements else ()

    def end(self, unit: U) -> Sequence[U]:
        """The backward of `unit` is over: what is to be gathered, if it was not yet."""
        self._missing.pop(unit, None)
        return self._following.pop(unit, ())

    def end_all(self) -> list[U]:
        """`end` of all, in the order in which they began."""
        following = [each for units in self._following.values() for each in units]
        self._missing, self._following = {}, {}
        return following
