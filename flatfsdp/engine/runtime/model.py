"""What exists once for a tree of units: their order, the lanes, the running backward, and the recovery from failures.

[Note: root] The root is the outermost wrapper of a model; it owns what its units must share. The *iteration root* is
the unit whose forward is the outermost at the moment, usually the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from ...errors import InternalError, UsageError, logger
from ..agreement.agreement import Agreement
from ..agreement.divergence import ModelNames
from ..agreement.once_per_job import warn_once_per_job
from ..base import _torch
from ..base import autograd as hooks
from ..base.events import Observers
from ..comm.comm_hook import reducers
from ..comm.process_groups import extent_of, groups_in_words, post_forward_axis
from ..config.arguments import has_forward
from ..flat.states import IDLE, SUMMONED
from ..flat.views import SHOWS_NOTHING, SHOWS_SHARD
from ..schedule.backward_driver import UnitRules
from ..schedule.forward_record import ForwardOrder, ForwardRecord
from .backward import Backward, rules_of
from .coalesced_collectives import Coalescer
from .conditional_units import ConditionalUnits
from .device_checks import check_hooked, check_placed, check_registered
from .finish import DeferLast, Finisher
from .grad_accumulators import GradAccumulators
from .gradient_flow import GradientFlow
from .iteration import BACKWARD, FAILED, LEFT_BEHIND, RETAINED, Iteration
from .model_facts import (
    Flags,
    axes_of,
    backward_plan,
    describe,
    initial_checksums,
    names_in,
    names_of_leaves,
    trained_parameters,
    unit_entries,
)
from .module_tree import entries
from .replica_checks import ReplicaChecks
from .resources import Resources, RootSettings
from .unit import Unit
from .unit_data import UnitData

Exceptions = tuple[frozenset[Unit], frozenset[Unit], Mapping[Unit, UnitRules[Unit]]]


class Root:
    """The shared state of one model's units.

    Attributes:
        unit: the outermost unit; units: all, children before parents as wrapped, the root last.
        entries: the units whose forward users call: the outermost one, or those inside it where it has no forward.
        resources: what the units share as values.
        iteration: what lives for one forward and its backward.
        sync: False inside `no_sync()`.
        is_last_backward: whether backwards end with all of their reductions. [Note: awaited]
        weight: what this rank's gradients count in the mean over ranks. [Note: uneven inputs]
        coalescer: which units share their collectives.
        observers: who looks on. [Note: observers]
    """

    def __init__(self, unit: Unit, resources: Resources, settings: RootSettings) -> None:
        self.unit = unit
        self.units: list[Unit] = [unit]
        self.entries: frozenset[Unit] = frozenset()
        self.settings = settings
        self.resources = resources
        self.sync = True
        self.is_last_backward = True
        self.weight = 1.0
        self.ready = False
        self.placed = False  # whether everything was found where it computes since it last moved
        self.gradient_flow = GradientFlow()
        self.coalescer = Coalescer(most=settings.join_units_below)
        self.conditional_units = ConditionalUnits()
        self.accumulators = GradAccumulators()
        self.observers = Observers()
        self._order: ForwardOrder[Unit] = ForwardOrder()
        self.agreement = Agreement(check_values=settings.check_values)
        self.iteration = Iteration(self.units, resources, self.agreement, self.accumulators, self.observers)
        self._schedule_description: str | None = None  # what was set, None when it has to be put together anew
        self._exceptions_by_sync: dict[bool, Exceptions] = {}  # found before, by `sync`
        self._replica_checks = ReplicaChecks(self.agreement)
        self._post_forward_axes_due = True  # units are to be told anew who keeps portions with them

    # -- construction and lazy init ----------------------------------------------------------------------------------

    def adopt(self, nested: list[Unit]) -> None:
        """Take the units of wrapped descendants into this tree, in front of the root's own."""
        self.units[:] = [*nested, self.unit]  # in place: the iteration has this list
        self._exceptions_by_sync.clear()
        for unit in nested:
            unit.root.iteration.wait_for_gradients()
            self.agreement.loaded |= unit.root.agreement.loaded
            self.accumulators.adopt(unit.root.accumulators)
            self.is_last_backward = self.is_last_backward and unit.root.is_last_backward
            unit.attach_to(self)

    def lazy_init(self, *, training: bool = False) -> None:
        """At the first forward: name and connect the units, and agree with the other ranks. Collective over all
        groups. `training`: the values that ranks begin with matter now."""
        if self.ready:
            return
        names = {id(module): name for name, module in self.unit.module.named_modules()}
        parameters = 0
        for index, unit in enumerate(self.units):
            unit.identify(names.get(id(unit.module), ""), index, parameters)
            for handle in unit.handles:
                handle.name = unit.name
                parameters += len(handle.leaves)
            self.connect(unit)
        self.entries = entries(self.unit)
        check_hooked(self.units)
        self._check_placed()
        self._choose_unshard_stream()
        if not any(unit.handles for unit in self.units):
            warn_once_per_job(
                f"{type(self.unit.module).__name__} is wrapped, but no unit of it has parameters: they are all "
                "ignored, or there are none. Nothing is sharded, and no gradient is averaged"
            )
        if training:
            for unit in self.units:
                unit.write_back()  # what a user put in a parameter's place is no value of the beginning
        self.agreement.connect(
            axes_of(self.units),
            ModelNames(unit_entries(self.units), names_in(self.units)),
            sharded=any(unit.groups.shard.size > 1 for unit in self.units),
            comm_stats=self.resources.comm_stats,
            events=self.resources.events,
        )
        self.agreement.compare(
            functools.partial(
                describe,
                self.units,
                check_values=self.settings.check_values,
                join_units_below=self.settings.join_units_below,
            ),
            functools.partial(initial_checksums, self.units) if training else None,
        )
        self.ready = True
        for plan in {id(unit.groups): unit.groups for unit in self.units if unit.groups.replicate is not None}.values():
            logger.info("%s over %s: %s", plan.strategy.name, extent_of(plan), groups_in_words(plan))
        logger.debug("initialised %d units: %s", len(self.units), ", ".join(unit.label for unit in self.units))

    def names_of_leaves(self) -> dict[int, str]:
        """The path of every parameter of the model, by its id."""
        return names_of_leaves(self.units)

    @property
    def steppable(self) -> Iterator[torch.Tensor]:
        """The parameters that optimizers see."""
        return (each for unit in self.units for handle in unit.handles for each in handle.steppable)

    def _check_placed(self) -> None:
        check_registered(self.unit.module, self.units)
        check_placed(self.unit.module, self.units, self.resources.device.device)
        self.coalescer.measure(self.units)
        self.placed = True

    def connect(self, unit: Unit) -> None:
        """Give `unit` its transports. [Note: communication hooks]"""
        groups, hook = unit.groups, unit.options.comm_hook
        transport = self.resources.transport
        unit.gather = transport(groups.shard if hook is None else groups.scatter, "gather")
        unit.scatter = transport(groups.scatter, "scatter")
        unit.replicate = transport(groups.replicate, "replicate") if groups.replicate is not None else None
        unit.reducers = unit.scatter, unit.replicate
        if hook is not None:
            unit.reducers = reducers(hook, groups, unit.scatter, unit.replicate)

    def in_full_precision(self, unit: UnitData) -> bool:
        """Whether `unit` computes in its master dtype now (evaluation, if asked for)."""
        return unit.mixed_precision.full_precision_in_eval and not unit.module.training

    def options_changed(self) -> None:
        """What users chose for a unit was changed."""
        self._schedule_description = None
        self._exceptions_by_sync.clear()
        self._post_forward_axes_due = True
        for observe in self.observers.options_changed:
            observe()
        self.coalescer.forget()
        self.conditional_units.forget()

    def dtypes_changed(self) -> None:
        """A shard has become another dtype: units weigh more, or less."""
        self.coalescer.measure(self.units)

    def set_unshard_async_op(self, async_op: bool) -> None:
        """Issue gathers on the caller's stream, and ahead only where a user says so; or on a lane of their own."""
        if self.ready:
            self.iteration.reset_to_idle()  # memory of the one lane does not go back to the other
            for unit in self.units:
                unit.evict_all()
        for unit in self.units:
            unit.set_schedule(unshard_async_op=async_op)
        self._choose_unshard_stream()

    def _choose_unshard_stream(self) -> None:
        on_callers = self.unit.options.schedule.unshard_async_op
        for unit in self.units:
            if unit.options.schedule.unshard_async_op is not on_callers:
                raise UsageError(
                    f"unit {unit.label}: set_unshard_async_op() was called on a {type(unit.module).__name__} that an "
                    f"outer {type(self.unit.module).__name__} was wrapped around later. Gathers of a model share one "
                    "order: call it on the outermost wrapper, when all are made"
                )
        self.resources.gather_on_callers_stream(on_callers)

    @property
    def schedule_description(self) -> str:
        """What was set, in words that are equal on all ranks; "" if nothing was."""
        if self._schedule_description is None:
            found: dict[str, list[str]] = {}
            for unit in self.units:
                for words in unit.describe_settings():
                    found.setdefault(words, []).append(unit.label)
            everywhere = len(self.units)
            reported = [
                f"{words} in {'all units' if len(labels) == everywhere else ', '.join(labels)}"
                for words, labels in sorted(found.items())
            ]
            reported += [each.description for each in self.observers.all if each.description]
            self._schedule_description = "; ".join(reported)
        return self._schedule_description

    # -- forward -----------------------------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> bool:
        """A forward of `unit` begins; True if it is the outermost."""
        outermost = self.iteration.depth == 0
        if outermost:
            self._begin(unit)
        self.iteration.depth += 1
        return outermost

    def _begin(self, unit: Unit) -> None:
        if not self.ready:
            if unit is not self.unit and has_forward(self.unit.module):
                raise UsageError(
                    f"the forward of a nested unit ({type(unit.module).__name__}) ran before the first forward of the "
                    "root "
                    f"({type(self.unit.module).__name__}) that it belongs to; call the outermost "
                    "FullyShardedDataParallel module first"
                )
            self.lazy_init(training=torch.is_grad_enabled())
        elif not self.placed:
            self._check_placed()
        if _torch.in_backward():
            return
        self.agreement.begin_forward(
            functools.partial(trained_parameters, self.units),
            training=torch.is_grad_enabled(),
            device_type=self.resources.device.device.type,
        )
        if self.iteration.stage in LEFT_BEHIND:
            self.iteration.finish_interrupted()
        try:
            if self.iteration.is_at_rest:
                self.iteration.retire_requests()
            for each in self.units:
                each.write_back()
            if torch.is_grad_enabled():
                self.accumulators.look_before_forward(self.units)
                self.agreement.compare_values(functools.partial(initial_checksums, self.units))
        except BaseException:
            self.iteration.abandon()
            raise
        for each in self.units:
            for views in each.views:
                views.guard()
        if torch.is_grad_enabled() and self.iteration.record.consumed:
            self.iteration.record = ForwardRecord()
            self.conditional_units.begin_record()
            self.gradient_flow.unhook()
        self._order.begin()
        self.conditional_units.begin(unit, training=torch.is_grad_enabled())
        self.gradient_flow.begin_forward()
        self.iteration.begin_forward()

    def leave(self, unit: Unit, *, failed: bool = False) -> None:
        """A forward of `unit` has ended."""
        self.iteration.depth -= 1
        if self.conditional_units.cursors:
            self.conditional_units.leave(self.iteration.depth)
        if self.iteration.depth or _torch.in_backward():
            return
        self.iteration.record.end()
        if failed:
            self.iteration.abandon()
            return
        self.agreement.end_forward()
        self._order.end()
        empty = self.iteration.record.empty
        self.iteration.end_forward(empty=empty)
        if not torch.is_grad_enabled() or empty:
            self.iteration.is_at_rest = True
            for each in self.units:
                if not each.keep_unsharded:
                    each.reset_to_idle(keep_unsharded=each.options.schedule.reshard_after_forward is False)
            self.resources.limiter.free_all()

    def gather_for_forward(self, unit: Unit) -> None:
        """Unshard `unit` (and the owners of its tied parameters), and start on the next. Collective."""
        if _torch.in_backward():
            self.conditional_units.check_recomputed(unit)
            if self.iteration.backward is not None:
                self.iteration.backward.recomputed(unit)
            else:
                self._gather(unit)
        elif not (self.conditional_units.exist and self.conditional_units.enter(unit)):
            self.gather_in_turn(unit)
        for each in (*unit.owning_units, unit):
            each.wait_unshard()

    def gather_in_turn(self, unit: Unit) -> None:
        """It is the turn of `unit`, on all ranks: start to gather it, and maybe the next. Collective."""
        first = self._order.enter(unit)
        schedule = self._schedule_description  # asked at every unit
        if schedule is None:
            schedule = self.schedule_description
        for observe in self.observers.before_first_gather if first else ():
            if words := observe(self):
                schedule += f"; {words}" if schedule else words
        self.agreement.check_order(unit.index, schedule=schedule)
        if first and not self.agreement.forwards_are_silent:
            if self._post_forward_axes_due:
                self._connect_post_forward_axes()
            if self._replica_checks.due is None and torch.is_grad_enabled() and self.agreement.compares_forwards:
                self._replica_checks.at_first(self.units)
            self._follow_other_ranks()
            for act in self.observers.first_gather_agreed:
                act(self)
        if torch.is_grad_enabled() or (self.conditional_units.training and unit.options.schedule.branch is not None):
            self.iteration.record.enter(unit, segment=_torch.saving(), segments=_torch.segments)
            for owning_unit in unit.owning_units:
                self.iteration.record.enter_sharing(owning_unit)
        elif self.conditional_units.training:
            self.iteration.record.enter_without_graph(
                unit, checkpoint=_torch.custom_forward(), segment=_torch.saving(), segments=_torch.segments
            )
            for owning_unit in unit.owning_units:
                self.iteration.record.enter_sharing_without_graph(owning_unit)
        self._gather(unit)
        if unit.forward_prefetch or unit.options.forward_targets:
            self._prefetch_in_forward(unit)

    def _gather(self, unit: Unit) -> None:
        if not _torch.in_backward():
            for each in (*unit.owning_units, unit):
                each.apply_shard_writes()
        for owning_unit in unit.owning_units:
            if owning_unit.phase is not SUMMONED:
                owning_unit.launch_unshard()
        self._launch(unit, self._order.upcoming())

    def _connect_post_forward_axes(self) -> None:
        """Let units know who keeps portions with them. [Note: post-forward shards]

        Collective over these ranks where a group is made, and so not before all ranks are known to have chosen alike.
        """
        for unit in self.units:
            count, device = unit.options.schedule.post_forward_ranks, self.resources.device.device
            axis = post_forward_axis(unit.groups.shard, count, device) if count is not None else None
            found = self.resources.transport(axis, "neighbours") if axis is not None else None
            if found is not unit.post_forward_gather:
                unit.drop_post_forward_shards()
                unit.post_forward_gather = found
        self._post_forward_axes_due = False

    def _launch(self, unit: Unit, following: Iterable[Unit], *, ahead: bool = False) -> None:
        """Gather `unit`, and small ones that are `following` it."""
        if unit.is_unsharded:
            return
        group = self.coalescer.first_gather(unit, following)
        self.coalescer.launch_unshard(group, ahead=ahead)
        self.iteration.ahead.update(dict.fromkeys(group if ahead else group[1:]))

    def _prefetch_in_forward(self, unit: Unit) -> None:
        for target in unit.options.forward_targets.units():
            self._launch(target, (), ahead=True)
        if unit.forward_prefetch and not unit.options.forward_targets:
            following = self._order.upcoming()
            for each in itertools.islice(following, 1):
                self._launch(each, following, ahead=True)

    def _follow_other_ranks(self) -> None:
        """Gather anew what users keep unsharded, if any rank has written to its shards. Collective if they do.

        An optimizer writes on some ranks only where others have no element of a unit.
        """
        kept = [unit for unit in self.units if unit.persists_between_iterations]
        if kept and self.agreement.any_rank(not all(unit.is_unsharded for unit in kept)):
            for unit in kept:
                unit.reshard(SHOWS_SHARD)
        for unit in kept:
            unit.persists_between_iterations = False

    def unshard(self, unit: Unit) -> None:
        """Start to gather `unit` because a user asks for it, in a forward or between iterations. Collective."""
        self.lazy_init()
        if not self.iteration.in_forward:
            self.iteration.finish_interrupted()
            if torch.is_grad_enabled():
                self.accumulators.look_before_forward(self.units)
        self.agreement.check_request(unit.index, "unshard")
        if not self.iteration.in_forward:
            self.resources.streams.unshard.follow_compute()
        for each in (*unit.owning_units, unit):
            each.launch_requested()
            self.iteration.ahead[each] = None
            if torch.is_grad_enabled():
                self.iteration.requested[each] = None
                each.unshard_at_first_gradient()

    def wait_for(self, unit: Unit) -> None:
        """Let `unit` show what `unshard` gathered, unless that is gone or in use."""
        with self.agreement.waiting(f"unshard() of unit {unit.label}"):
            for each in (*unit.owning_units, unit):
                if each.is_unsharded and each.phase is IDLE:
                    each.wait_unshard()
                    each.track_writes(described_as_unsharded=True)

    def reshard(self, unit: Unit) -> None:
        """Free the unsharded parameters of `unit` because a user asks for it."""
        self.lazy_init()
        self.iteration.clear_failure()
        if self.iteration.stage is RETAINED or unit.keep_unsharded or unit.phase is not IDLE:
            raise UsageError(
                f"reshard() of unit {unit.label}: its parameters are still read, by its own forward or by a backward "
                "that needs them as they are. Call it after that"
            )
        self.agreement.check_request(unit.index, "reshard")
        if self.iteration.is_at_rest:
            unit.retire_request(written=True)
        unit.check_left_unsharded()
        awaits_backward = not self.iteration.record.consumed and unit in self.iteration.record.entered
        unit.reshard(SHOWS_NOTHING if awaits_backward else SHOWS_SHARD)
        unit.drop_post_forward_shards()
        unit.persists_between_iterations = False

    # -- backward ----------------------------------------------------------------------------------------------------

    def begin_backward(self) -> Backward:
        """The backward that runs; the first sign of it plans it."""
        for observe in self.observers.backward_reaches:
            observe()
        if self.iteration.backward is not None:
            self.iteration.backward.double = self.iteration.backward.double or torch.is_grad_enabled()
            return self.iteration.backward
        if not _torch.in_backward():
            raise InternalError(f"unit {self.unit.label}: a gradient arrived outside of a backward")
        self.observers.begin_step(self, None)
        if self.iteration.stage is FAILED:  # the same graph again, after a backward that failed
            self.iteration.finish_interrupted()
        self.iteration.wait_for_gradients()
        self.iteration.follow_requests()
        with _torch.as_plain_tensors():  # leaves may be hidden
            trained = {unit: unit.trained() for unit in self.iteration.record.anchored}
        unreduced, kept, rules = self._exceptions()
        sync = len(unreduced) < len(self.units)
        self._check_backward(trained, reduces=sync)
        self._replica_checks.before_backward(self.units, reduces=sync)
        if self.iteration.is_at_rest:  # a graph older than the last rest
            self.iteration.follow_writes()
        self.iteration.record.consumed = True
        backward = Backward(
            self.iteration.record,
            rules=rules,
            stays_unsharded=kept,
            sync=sync,
            agreement=self.agreement,
            coalescer=self.coalescer,
            finisher=self._finisher(sync=sync),
            branches=self.conditional_units,
        )
        self.iteration.backward = backward
        self.iteration.enter(BACKWARD)
        backward.double = torch.is_grad_enabled()
        # Bound to this backward: on an accelerator a failed one may be let go late, by another thread.
        ended, failed = self.iteration.end_backward, self.iteration.fail_backward
        hooks.at_end_of_backward(functools.partial(ended, backward), functools.partial(failed, backward))
        self.accumulators.look_before_backward(self.units)
        with _torch.as_plain_tensors():
            for unit in self.iteration.record.begun:
                for grads in unit.grads:
                    grads.stash_grads()
        for unit in self.units:
            for grads in unit.grads:
                if grads.accumulation.pending:
                    backward.expect(unit, reached=False)
        for unit, flags in trained.items():
            if any(map(any, flags)):
                backward.expect(unit)
        backward.join_reductions()
        return backward

    def _finisher(self, *, sync: bool) -> Finisher:
        """What finishes the backward that begins."""
        made = [found for make in self.observers.finisher if (found := make(self, sync=sync)) is not None]
        if made or self.is_last_backward or self.observers.backward_ends:
            return made[0] if made else Finisher()
        return DeferLast(self.agreement, self.accumulators)

    def _check_backward(self, trained: dict[Unit, Flags], *, reduces: bool) -> None:
        post_forward = tuple(
            unit.index for unit in self.units if unit.post_forward_gather and unit.has_post_forward_shards
        )
        begun, anchored = self.iteration.record.entered, self.iteration.record.anchored
        # Hashed at every step: units by identity, and no dict.
        reduced = tuple(trained), tuple(trained.values())
        plan = self.sync, begun, anchored, reduced, post_forward, self.schedule_description
        self.agreement.check_backward(
            plan,
            lambda: backward_plan(self.sync, begun, anchored, trained, post_forward, self.schedule_description),
            reduces=reduces,
        )

    def _exceptions(self) -> Exceptions:
        """The units of which the next backward does not reduce gradients, those that stay unsharded after it, and the
        rules of all for its schedule."""
        found = self._exceptions_by_sync.get(self.sync)
        if found is None:
            unreduced = frozenset(unit for unit in self.units if not (self.sync and unit.options.schedule.reduce))
            rules = {unit: rules_of(unit, reduces=unit not in unreduced) for unit in self.units}
            unsharded = frozenset(unit for unit, rule in rules.items() if rule.stays_unsharded)
            found = self._exceptions_by_sync[self.sync] = unreduced, unsharded, rules
        return found

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards inside the context are accumulated unsharded and not reduced."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before
