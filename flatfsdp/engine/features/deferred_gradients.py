"""Reductions that continue after a backward that is not the last. [Note: deferred gradients]"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

from ..base import autograd as hooks
from ..base.events import Observer
from ..base.peers import Peers
from ..flat.gradients import Gradients
from ..flat.reduction import ReductionInput
from ..guards.deferred_grad import PendingGradients, can_defer
from ..runtime.finish import Finished, Finisher
from ..runtime.model import Model, model_of
from ..runtime.model_facts import steppable_of
from ..runtime.unit import Unit
from .gradient_hooks import GradientHooks


class DeferredGradients(Observer):
    """Attached to one model while its backwards are not the last of several."""

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)

    def finisher(self, *, sync: bool) -> Finisher | None:
        """One that overlaps the last reductions with the code after the backward; None if an observer reads all
        gradients when the backward ends."""
        model = self._model()
        if model is None or model.observers.backward_ends:
            return None
        return DeferLast(model.agreement, model.observers.find(GradientHooks))


def defers(model: Model) -> bool:
    """Whether backwards of `model` are not the last of several."""
    return model.observers.find(DeferredGradients) is not None


def set_defers(model: Model, *, later: bool) -> None:
    """Let backwards of `model` leave their last reductions to `later`, or finish all again."""
    if (found := model.observers.find(DeferredGradients)) is not None and not later:
        model.observers.remove(found)
    elif found is None and later:
        model.observers.set(DeferredGradients(model), *model.observers.all)  # finishers of others come after it


def defer_as(model: Model, nested: Iterable[Unit]) -> None:
    """Let `model` do so if that of any of the `nested` units, which become part of it, does."""
    set_defers(model, later=any(defers(model_of(unit)) for unit in nested))


class DeferLast(Finisher):
    """Overlaps the last reductions with the code after the backward; a read of `.grad` waits."""

    ends_with_all = False

    def __init__(self, agreement: Peers, gradient_hooks: GradientHooks | None) -> None:
        self._agreement = agreement  # not the model: pending gradients would form a reference cycle with it
        self._gradient_hooks = gradient_hooks
        self._left: Sequence[Unit] = ()

    def leaves(self, units: Sequence[Unit]) -> bool:
        if leaves := all(map(_can_finish_later, units)):
            self._left = units
        return leaves

    def backward_ended(self, units: Iterable[Unit]) -> Finished:
        later = [unit for unit in self._left if self._can_wait(unit)]
        finished = super().backward_ended([unit for unit in units if unit not in later])
        if later:
            self._defer(later)
        return finished

    def _can_wait(self, unit: Unit) -> bool:
        """Whether gradients of `unit` are only read through `.grad`, which can be made to wait."""
        if self._gradient_hooks is not None and not self._gradient_hooks.expects_gradients.isdisjoint(unit.handles):
            return False
        return all(map(can_defer, steppable_of(unit)))

    def _defer(self, units: Sequence[Unit]) -> None:
        finishes: list[Callable[[], object]] = []
        for grads in [grads for unit in units for grads in unit.grads]:
            grads.finalize_grads(finishes)
        agreement = self._agreement

        def finish() -> None:
            with agreement.waiting("the reductions of a backward that was not the last"):
                for each in finishes:
                    each()

        self.pending = PendingGradients([parameter for unit in units for parameter in steppable_of(unit)], finish)


def _can_finish_later(unit: Unit) -> bool:
    """Whether the reductions of `unit` may finish after the backward: only reads of `.grad` depend on them."""
    if unit.options.comm_hook is not None or hooks.user_hooked((*steppable_of(unit), *unit.trainable_leaves())):
        return False
    return all(map(_arrive_unfinished, [grads for grads in unit.grads if grads.reducing]))


def _arrive_unfinished(grads: Gradients) -> bool:
    """Whether the pending reduction can become `.grad` before it is finished."""
    handle = grads.handle
    if len(grads.reducing) != 1 or grads.accumulation.partial is not None or not grads.completes:
        return False
    arrives_on_shard_device = handle.precision.reduce == handle.precision.grad and not handle.options.offload
    return arrives_on_shard_device and _arrives_without_wait(grads.reducing[0])


def _arrives_without_wait(given: ReductionInput) -> bool:
    """Whether one exchange brings the result, from memory of its own."""
    if given.reduction is None or given.reduction.replicate is not None or given.buffer is None:
        return False
    shares = given.shares_unsharded_buffer or given.handle.is_unsharded_at_rest
    return not (shares or given.hook is not None or given.downloads)
