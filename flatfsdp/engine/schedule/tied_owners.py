"""The owners of tied parameters, which other units use as well, during one backward; pure.

[Note: tied owners] An owner is gathered with each of its users. All of its gradients may have arrived before this
backward reaches one of the users, or its own call: a rank's data may skip the use from which other ranks' gradients
come. If it were freed then, that rank alone would gather it again. So it stays unsharded until its own call is over,
and the calls of users that began later: the backward reaches these first, or passes over them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from .backward_clock import BackwardClock
from .backward_driver import UnitFacts, UnitRules

U = TypeVar("U", bound=Hashable)


class TiedOwners(Generic[U]):
    """The owners that this backward may reach again."""

    def __init__(self, clock: BackwardClock[U], rules: Mapping[U, UnitRules[U]], facts: UnitFacts[U]) -> None:
        self._clock, self._rules, self._facts = clock, rules, facts
        self._reached: dict[U, bool] = {}  # the owners reached: whether gradients had arrived before that

    def reached(self, unit: U) -> None:
        """Called when the backward reaches a call of `unit`."""
        if unit in self._clock.tied_owners:
            self._reached.setdefault(unit, self._facts.has_gradients(unit))

    def awaits_own_call(self, unit: U) -> bool:
        """Whether other units use parameters of `unit`, whose own call this backward has not reached."""
        return unit in self._clock.tied_owners and unit not in self._reached

    def may_be_used(self, owner: U) -> bool:
        """Whether this backward may still reach `owner`, or units that use its parameters and began later."""
        if owner not in self._clock.tied_owners:
            return False
        began, rules = self._clock.began, self._rules
        users = (unit for unit in self._clock.begun if began[unit] > began[owner] and owner in rules[unit].owners)
        return not (self._is_over(owner) and all(map(self._is_over, users)))

    def _is_over(self, unit: U) -> bool:
        """Whether it is known that this backward reaches no more calls of `unit`."""
        if self._facts.is_over(unit):
            return True
        if unit in self._clock.tied_owners and self._reached.get(unit, True):
            return False  # its own use may still be recomputed, and compute a gradient late
        return self._facts.completed(unit) and unit not in self._clock.several
