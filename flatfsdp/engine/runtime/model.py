"""One model: its units, and what they share.

[Note: root] The model belongs to the outermost wrapper, and nested wrappers' units to the model around them. Its parts
get what they need as values, and know no model; a wrapper finds its unit's (`model_of`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...errors import UsageError, refuse_type
from ..agreement.agreement import Agreement
from ..base.events import Observers
from ..flat.states import IDLE
from ..flat.views import SHOWS_NOTHING, SHOWS_SHARD
from .backward_hooks import BackwardHooks
from .coalesced_collectives import Coalescer
from .forward_driver import ForwardDriver, unshard_at_first_gradient
from .forward_gathers import ForwardGathers
from .grad_accumulators import GradAccumulators
from .iteration import RETAINED, Iteration
from .model_facts import steppable_of
from .module_tree import units_at
from .persistence import evict_all
from .replica_checks import ReplicaChecks
from .resources import ModelSettings, Resources
from .setup import Setup
from .unit import Unit, refuse_without_model
from .user_writes import begin_request, check_left_unsharded, follow_before_request, retire_request


class Model:
    """What exists once for all units of a model.

    Attributes:
        setup: the units, how they become one, and what users choose of them.
        units: all, children before parents as wrapped, the outermost last.
        resources: what the units share as values.
        iteration: what lives for one forward and its backward.
        agreement: what ranks have in common.
        forwards, backwards: drive these.
        coalescer: which units share their collectives.
        accumulators: nodes of autograd that users hold.
        observers: who looks on. [Note: observers]
    """

    def __init__(self, unit: Unit, resources: Resources, settings: ModelSettings) -> None:
        self.resources = resources
        self.observers = observers = Observers()
        self.accumulators = accumulators = GradAccumulators()
        self.agreement = agreement = Agreement(check_values=settings.check_values)
        self.coalescer = coalescer = Coalescer(most=settings.join_units_below)
        self.setup = setup = Setup([unit], settings, resources, agreement, coalescer, observers)
        self.units = units = setup.units
        self.iteration = iteration = Iteration(units, resources, agreement, accumulators, observers)
        shared: dict[str, Any] = {
            "setup": setup,
            "iteration": iteration,
            "agreement": agreement,
            "observers": observers,
        }
        checks = ReplicaChecks(agreement)
        self.backwards = BackwardHooks(**shared, accumulators=accumulators, coalescer=coalescer, replica_checks=checks)
        gathers = ForwardGathers(**shared, coalescer=coalescer, replica_checks=checks)
        self.forwards = ForwardDriver(
            **shared, resources=resources, accumulators=accumulators, gathers=gathers, backwards=self.backwards
        )
        self.backwards.attach(unit)
        self._take(unit)

    @property
    def outermost(self) -> Unit:
        """The unit of the outermost wrapper."""
        return self.setup.outermost

    @property
    def steppable(self) -> Iterator[torch.Tensor]:
        """The parameters that optimizers see."""
        return (each for unit in self.units for each in steppable_of(unit))

    def _take(self, unit: Unit) -> None:
        _models[unit] = weakref.ref(self)
        unit.resources = self.resources
        unit.place = replace(unit.place, is_outermost=unit is self.outermost)
        for handle, _, grads in unit.kinds:
            handle.move_to_tracker(self.resources.tracker)
            if grads.residuals is not None:
                grads.residuals.move_to_tracker(self.resources.tracker)

    def adopt(self, nested: list[Unit]) -> None:
        """Take the units of wrapped descendants into this model, in front of the outermost one."""
        parts = {unit: model_of(unit) for unit in nested}  # which may have other units, that stay theirs
        self.units[:] = [*nested, self.outermost]  # in place: parts of the model have this list
        self.setup.version += 1
        for part in dict.fromkeys(parts.values()):
            part.iteration.wait_for_gradients()
            self.agreement.loaded |= part.agreement.loaded
            self.accumulators.adopt(part.accumulators)
        for unit, part in parts.items():
            self.backwards.adopt(unit, part.backwards)
            if (checksums := part.setup.initial_checksums.pop(unit, None)) is not None:
                self.setup.initial_checksums[unit] = checksums
            self._take(unit)

    # -- what users ask for ------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards inside the context are accumulated unsharded and not reduced."""
        before, self.backwards.sync = self.backwards.sync, False
        try:
            yield
        finally:
            self.backwards.sync = before

    def set_unshard_async_op(self, async_op: bool) -> None:
        """Issue gathers on the caller's stream, and ahead only where a user sets that; or on a stream of their own."""
        if self.setup.ready:
            self.iteration.reset_to_idle()  # memory of the one stream does not go back to the other
            for unit in self.units:
                evict_all(unit)
        for unit in self.units:
            self.setup.set_schedule(unit, unshard_async_op=async_op)
        self.setup.choose_unshard_stream()

    def unshard(self, unit: Unit) -> None:
        """Start to gather `unit` because a user asks for it, in a forward or between iterations. Collective."""
        setup, iteration = self.setup, self.iteration
        setup.lazy_init()
        if not iteration.in_forward:
            iteration.finish_interrupted()
            if torch.is_grad_enabled():
                self.accumulators.look_before_forward(self.units)
        self.agreement.check_request(unit.place.index, "unshard")
        if not iteration.in_forward:
            self.resources.streams.unshard.follow_compute()
        for each in (*unit.owning_units, unit):
            at_rest = iteration.is_at_rest and each.phase is IDLE
            if at_rest:
                retire_request(each, written=False)  # an earlier one
            setup.write_back([each])
            follow_before_request(each, self.agreement, at_rest=at_rest)
            begin_request(each, at_rest=at_rest)
            gathered = self.coalescer.launch_unshard((each,), ahead=True)
            if iteration.backward is not None:
                iteration.backward.gathered += [unit.place.index for unit in gathered]
            iteration.ahead[each] = None
            if torch.is_grad_enabled():
                iteration.requested[each] = None
                unshard_at_first_gradient(each, self.backwards.of_unit[each])

    def wait_for(self, unit: Unit) -> None:
        """Let `unit` show what `unshard` gathered, unless that is gone or in use."""
        with self.agreement.waiting(f"unshard() of unit {unit.label}"):
            for each in (*unit.owning_units, unit):
                if each.is_unsharded and each.phase is IDLE:
                    each.wait_unshard()
                    each.track_writes(described_as_unsharded=True)

    def reshard(self, unit: Unit) -> None:
        """Free the unsharded parameters of `unit` because a user asks for it."""
        iteration = self.iteration
        self.setup.lazy_init()
        iteration.clear_failure()
        if iteration.stage is RETAINED or unit.backward.keep_unsharded or unit.phase is not IDLE:
            raise UsageError(
                f"reshard() of unit {unit.label}: its parameters are still read, by its own forward or by a backward "
                "that needs them as they are. Call it after that"
            )
        self.agreement.check_request(unit.place.index, "reshard")
        if iteration.is_at_rest:
            retire_request(unit, written=True)
        check_left_unsharded(unit)
        awaits_backward = not iteration.record.consumed and unit in iteration.record.entered
        unit.reshard(SHOWS_NOTHING if awaits_backward else SHOWS_SHARD, unreached=iteration.backward is not None)
        unit.drop_post_forward_shards()
        unit.kept.end_choice()


# The model of each unit, as long as both live.
_models: weakref.WeakKeyDictionary[Unit, weakref.ref[Model]] = weakref.WeakKeyDictionary()


def model_of(unit: Unit) -> Model:
    """The model that `unit` belongs to.

    Raises:
        UsageError: it has been deleted.
    """
    model = _models[unit]()
    if model is None:
        refuse_without_model(unit)
    return model


def check_outermost(unit: Unit, call: str) -> Model:
    """The model of `unit`; refuses a `call` on any but the outermost unit."""
    model = model_of(unit)
    if model.outermost is not unit:
        kind = "module of fully_shard()" if unit.entries.in_place else "FullyShardedDataParallel module"
        raise UsageError(
            f"{call} was called on a nested unit ({unit.entries.class_name}); call it on the outermost {kind} "
            f"({model.outermost.entries.class_name})"
        )
    return model


def outermost_model(wrapper: object, function: str) -> Model:
    """The model of `wrapper`, which a user gave to `function` as the outermost one.

    Raises:
        ConfigTypeError: it is no wrapper.
        UsageError: it is a nested one.
    """
    units = units_at(wrapper) if isinstance(wrapper, nn.Module) else []
    if not units:
        refuse_type(f"{function}: model", wrapper, "the outermost FullyShardedDataParallel module of a model")
    return check_outermost(units[0], f"{function}()")
