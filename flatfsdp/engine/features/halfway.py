"""Backwards that gather the next unit half-way through the gradients of this one, for `BACKWARD_MID`.

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

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch

from ..runtime.backward_hooks import UnitHooks
from ..runtime.model import Model
from ..schedule.actions import Action
from ..schedule.backward_clock import NEVER
from ..schedule.backward_schedule import BackwardSchedule

U = TypeVar("U", bound=Hashable)


def attach_halfway(model: Model) -> None:
    """Let backwards of `model`, whose outermost unit is new, gather half-way, if any of its units may."""
    unit, backwards = model.outermost, model.backwards
    if unit.built.counts_gradients:
        backwards.of_unit[unit] = CountingHooks(unit, backwards)
    if any(each.built.counts_gradients for each in model.setup.units):
        backwards.schedule = HalfwaySchedule


class CountingHooks(UnitHooks):
    """The hooks of a unit that gathers the next one half-way: they count its gradients."""

    def leaf_ready(self, kind: int, index: int, leaf: torch.Tensor) -> None:
        super().leaf_ready(kind, index, leaf)  # this releases the gradient
        unit, driver = self.unit(), self.driver()
        backward = driver.iteration.backward if driver is not None else None
        if unit is not None and driver is not None and backward is not None:
            assert isinstance(backward.schedule, HalfwaySchedule)
            elements = unit.handles[kind].layout.params[index].numel
            driver.iteration.executor.do(backward.schedule.progressed(unit, elements), backward)


class HalfwaySchedule(BackwardSchedule[U]):
    """The decisions of one backward, in which some units gather the next one half-way."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._halfway: HalfwayTrigger[U] = HalfwayTrigger()
        self._reduced: U | None = None  # the unit that was reduced last

    @staticmethod
    def elements(unit: Any) -> int:
        """The number of elements of the gradients that `unit` can get."""
        return sum(h.layout.params[i].numel for h in unit.handles for i in h.trainable_indices())

    @staticmethod
    def is_gathered_again(unit: Any) -> bool:
        """Whether `unit` was freed after its forward."""
        return bool(unit.resolved.reshards_after_forward)

    def progressed(self, unit: U, elements: int) -> list[Action[U]]:
        """So many `elements` of gradients of `unit` have arrived: gather the next unit when they are half of all."""
        actions = self._actions = []
        self._gather_at_halfway(self._halfway.gradient_elements_arrived(unit, elements))
        return actions

    def _gather_in_turn(self, unit: U) -> None:
        if not (self.gathers.has_turn(unit) or self._is_unsharded(unit)):
            self._gather_at_halfway(self._halfway.end_all())
        super()._gather_in_turn(unit)

    def _prefetch_after(self, unit: U) -> None:
        rules, following = self._rules[unit], self.gathers.following(unit)
        if rules.prefetch != "halfway" or rules.targets or not self._awaits_half(unit, following):
            super()._prefetch_after(unit)
            return
        self._halfway.begin(unit, self.elements(unit) if self.brings else 0, following)
        self._gather_at_halfway(self._halfway.gradient_elements_arrived(unit, 0))

    def _awaits_half(self, unit: U, following: Sequence[U]) -> bool:
        """Whether `unit` has a part of its own in the plan, and is around none of the units `following` it."""
        began = self.clock.began
        own = began.get(unit, NEVER)
        return unit in self.clock.planned and not any(began.get(each, NEVER) > own for each in following)

    def _gather_at_halfway(self, following: Sequence[U]) -> None:
        due = self.gathers.through(following, ahead=True) if following else ()
        if any(self._rules[unit].reads and not self._is_unsharded(unit) for group in due for unit in group):
            self._actions.append(("release inputs", ()))
        self._gather(due, ahead=True)

    def _ready_to_reduce(self, unit: U) -> None:
        self._gather_at_halfway(self._halfway.end(unit))
        super()._ready_to_reduce(unit)

    def _reduce(self, groups: Iterable[Sequence[U]]) -> None:
        groups = list(groups)
        super()._reduce(groups)
        if groups:
            self._reduced = groups[-1][-1]
        rules = self._rules[self._reduced] if self._reduced is not None else None
        if rules is None or rules.prefetch != "halfway" or rules.targets or not self.gathers.is_over:
            return
        if any(map(self.is_gathered_again, self.reductions.outstanding())):  # nothing overlaps with their backwards
            self._actions.append(("release inputs", ()))


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
