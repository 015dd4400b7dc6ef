"""Owners of tied parameters, which other units use beside their own, while one backward runs; pure.

[Note: tied owners] An owner is gathered with each of its users, and its gradients may all have come before this
backward reaches one of them, or its own call: a rank's data may leave out the use that other ranks' gradients come
from. Freed then, it would be gathered again by that rank alone. So it stays until its own call is over, and those of
users that began later: the backward comes to these first, or passes over them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from .backward_clock import BackwardClock
from .backward_driver import UnitFacts, UnitRules

U = TypeVar("U", bound=Hashable)


class TiedOwners(Generic[U]):
    """Which owners this backward may come to again."""

    def __init__(self, clock: BackwardClock[U], rules: Mapping[U, UnitRules[U]], facts: UnitFacts[U]) -> None:
        self._clock, self._rules, self._facts = clock, rules, facts
        self._reached: dict[U, bool] = {}  # of the owners, and whether gradients had come before

    def reached(self, unit: U) -> None:
        """A gradient is about to flow into a call of `unit`."""
        if unit in self._clock.tied_owners:
            self._reached.setdefault(unit, self._facts.has_gradients(unit))

    def awaits_own_call(self, unit: U) -> bool:
        """Whether others use parameters of `unit`, which this backward has not come to itself."""
        return unit in self._clock.tied_owners and unit not in self._reached

    def may_be_used(self, owner: U) -> bool:
        """Whether this backward may still come to `owner`, or to units that use its parameters and began later."""
        if owner not in self._clock.tied_owners:
            return False
        began, rules = self._clock.began, self._rules
        users = (unit for unit in self._clock.begun if began[unit] > began[owner] and owner in rules[unit].owners)
        return not (self._is_over(owner) and all(map(self._is_over, users)))

    def _is_over(self, unit: U) -> bool:
        """Whether it is known that this backward comes to no call of `unit` any more."""
        if self._facts.is_over(unit):
            return True
        if unit in self._clock.tied_owners and self._reached.get(unit, True):
            return False  # its own use of what came already may be recomputed, and bring a gradient late
        return self._facts.completed(unit) and unit not in self._clock.several
