"""The progress of units' backwards, measured by the gradients that have arrived; pure.

[Note: half-way] A backward that overlaps a gather and a reduction with each unit needs three unsharded units at a time:
the one in use, the prefetched one, and the one that is reduced. Two suffice if each overlaps with half of a unit. While
the first half of its gradients is computed, the previous unit is reduced, which then releases its inputs; during the
second half, the next unit is gathered. The last unit in the plan has none to prefetch, and nothing overlaps with it.
Memory peaks there, since every unit leaves a shard of gradients, so the reduction before it is waited for where it is
issued. Units around others are unsharded together with them in any case: the unit that they prefetch is not a third
one, and is gathered when their backwards begin. The same holds for units that are recomputed reentrantly: ranks that
lack some of their gradients reduce them late.

Ranks need not agree on the time at which half has arrived: the unit to gather is fixed when the backward begins, and is
next in the plan ([Note: backward order]). Only a gather without a turn in the plan must find the plan at the same place
on all ranks: units that await half of another unit's gradients are gathered before it. Ranks do not deadlock, either:
gradients of a unit arrive before those of units that began earlier. So every rank issues the awaited reduction before
it needs a gather that the waiting rank has not issued, and gathers that are due before a reduction precede it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)


class HalfwayTrigger(Generic[U]):
    """The units whose backward has begun and is not half-way: measured by elements of gradients, instead of time."""

    def __init__(self) -> None:
        self._missing: dict[U, int] = {}  # elements of gradients until half of them have come
        self._following: dict[U, Sequence[U]] = {}

    def begin(self, unit: U, elements: int, following: Sequence[U]) -> None:
        """Begin the backward of `unit`, whose gradients have so many `elements` in total.

        `following`: the units to gather half-way.
        """
        self._missing[unit] = (elements + 1) // 2
        self._following[unit] = following

    def gradient_elements_arrived(self, unit: U, elements: int) -> Sequence[U]:
        """Count more `elements` that have arrived; returns the units to gather when half of all have, once."""
        missing = self._missing.get(unit)
        if missing is None:
            return ()
        self._missing[unit] = missing - elements
        return self.end(unit) if missing <= elements else ()

    def end(self, unit: U) -> Sequence[U]:
        """End the backward of `unit`; returns the units to gather, unless they were returned before."""
        self._missing.pop(unit, None)
        return self._following.pop(unit, ())

    def end_all(self) -> list[U]:
        """`end` of all units, in the order in which they began."""
        following = [each for units in self._following.values() for each in units]
        self._missing, self._following = {}, {}
        return following
