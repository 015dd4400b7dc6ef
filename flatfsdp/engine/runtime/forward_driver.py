"""The driver of forwards: comparisons between ranks, gathers, casts and hooks around the forward of a wrapped module.

Which units are gathered and freed when is decided in `schedule/forward_schedule.py`, and executed in
`executor.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...errors import UsageError, is_new
from ..base import _functorch, _torch
from ..base import autograd as hooks
from ..base.events import Observers
from ..base.nested_tensors import cast_floating, map_tensors, tensors_in
from ..base.peers import RUNS, STAYED, Peers, with_unsharded
from ..flat.states import FORWARD, IDLE, PHASE_STEPS, SHARDED, SUMMONED, UNSHARDED, Left
from ..flat.views import SHOWS_SHARD, SHOWS_UNSHARDED
from ..schedule.actions import Action
from ..schedule.forward_schedule import ForwardFacts, ForwardRecord, ForwardSchedule
from .backward_hooks import BackwardHooks, GradientHook, UnitHooks
from .gradient_flow import GradientFlow
from .inputs import Given
from .iteration import ENDED_BADLY, FAILED, LEFT_BEHIND, Iteration, Outcome
from .model_facts import trained_parameters
from .resources import Resources
from .setup import Setup
from .turns import PLAIN
from .unit import Unit, shared_under_reentrance
from .unit_collectives import UnitCollectives
from .unit_state import ForwardCall
from .user_writes import follow_other_ranks

_REQUIRES_GRAD = attrgetter("requires_grad")

FACTS: ForwardFacts[Unit] = ForwardFacts(
    owners=attrgetter("owning_units"),
    users=Unit.alive_sharing_units,
    has_users=attrgetter("sharing_units"),
    runs=lambda unit: unit.phase is FORWARD,
    is_requested=lambda unit: unit.phase is SUMMONED,
    joins=lambda unit: False,
    gathers_next=attrgetter("options.forward_prefetch"),
    lists=attrgetter("options.forward_targets"),
    listed=lambda unit: unit.options.forward_targets.units(),
    coalesced=lambda unit, following: (unit,),
    reshards=attrgetter("resolved.reshards_after_forward"),
    stays=attrgetter("backward.keep_unsharded"),
    retains=attrgetter("kept.retain"),
    lacks=lambda unit, ran: unit.entries.lacks(ran),
)


@dataclass(eq=False)
class ForwardDriver:
    """Drives the forwards of one model.

    Attributes:
        given: of the inputs of each call; another class may be given.
    """

    setup: Setup
    iteration: Iteration
    resources: Resources
    agreement: Peers
    observers: Observers
    coalescer: UnitCollectives
    backwards: BackwardHooks
    gradient_flow: GradientFlow = field(default_factory=GradientFlow)
    given: type[Given] = Given
    _turns_version: int = -1  # of the options that the turns depend on

    def __post_init__(self) -> None:
        facts = replace(FACTS, joins=self.coalescer.small.__contains__, coalesced=self.coalescer.first_gather)
        self.schedule: ForwardSchedule[Unit] = ForwardSchedule(facts)

    # -- a forward of the model --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The outermost forward begins."""
        setup, iteration, agreement = self.setup, self.iteration, self.agreement
        training = torch.is_grad_enabled()
        if not setup.ready:
            setup.lazy_init(training=training)
        elif not setup.placed:
            setup.check_placed()
        if _torch.in_backward():
            return
        if iteration.stage in LEFT_BEHIND:
            iteration.leave_backward()
        agreement.begin_forward(
            functools.partial(trained_parameters, setup.units),
            training=training,
            device_type=self.resources.device.device.type,
        )
        if iteration.stage is FAILED:
            iteration.finish_interrupted()
        try:
            if iteration.is_at_rest and iteration.executor.ahead:
                iteration.retire_requests()
            setup.take_over(setup.units)
            if training:
                for observe in self.observers.training_begins:
                    observe(setup.units)
                agreement.compare_values(setup.checksums)
        except BaseException:
            iteration.close(Outcome.ABANDONED)
            raise
        for each in setup.units:
            for views in each.views:
                views.refuse_holders()
        new_record = training and iteration.record.consumed
        if new_record:
            iteration.record = ForwardRecord()
            self.gradient_flow.unhook()
        self.schedule.order.begin()
        iteration.training = training
        if self._turns_version != setup.version:
            self._turns_version = setup.version
            handed = [turns for make in self.observers.forward_order if (turns := make(setup.units)) is not None]
            iteration.turns = handed[0] if handed else PLAIN
        if not iteration.turns.plain:
            iteration.turns.begin(training=training, new_record=new_record)
        self.gradient_flow.begin_forward()
        iteration.begin_forward()

    def _end(self, unit: Unit, *, failed: bool = False) -> None:
        """The outermost forward, of `unit`, has ended."""
        iteration = self.iteration
        if _torch.in_backward():
            return
        iteration.record.end()
        if failed:
            self.schedule.lacking.clear()
            iteration.close(Outcome.ABANDONED)
            return
        self.agreement.end_forward()
        self.schedule.order.end()
        if self.schedule.lacking:
            iteration.executor.do(self.schedule.ended(iteration.record, unit))
        empty = iteration.record.empty or iteration.record.consumed
        iteration.end_forward(empty=empty)
        if not torch.is_grad_enabled() or empty:
            iteration.is_at_rest = True
            for each in self.setup.units:
                if not each.backward.keep_unsharded:
                    each.reset_to_idle(keep_unsharded=each.options.schedule.reshard_after_forward is False)
            self.resources.limiter.free_all()
        for each in self.setup.units:
            for views in each.views:
                if views.mode is SHOWS_UNSHARDED and views.left is Left.COMPUTING:
                    views.track_writes()  # an owner, which other units have used since its own forward

    def _end_inner_failure(self) -> None:
        """A backward inside of the forward failed, and the forward goes on: bring units to rest, except those whose
        forwards run, after all ranks have abandoned that backward."""
        self.iteration.leave_backward()
        self.agreement.meet_abandoned()
        self.iteration.finish_interrupted()

    # -- gathers -----------------------------------------------------------------------------------------------------

    def _gather_again(self, unit: Unit) -> None:
        """Start to gather `unit`, whose forward runs inside a backward. Collective."""
        iteration = self.iteration
        if not iteration.turns.plain:
            iteration.turns.check_recomputed(unit)
        backward = iteration.backward
        actions = self.schedule.enters(unit, in_order=False) if backward is None else backward.recomputed(unit)
        iteration.executor.do(actions, backward)

    def take_turn(self, unit: Unit, *, runs: bool = False) -> list[Action[Unit]]:
        """It is the turn of `unit`, on all ranks: compare this, and record it; returns what gathers it, and possibly
        the next. `runs`: it is called inside of its own forward. Collective if ranks were not expected here, and at
        the first turn of a forward if units were kept."""
        self._compare_turn(unit, runs=runs)
        iteration, owners, training = self.iteration, unit.owning_units, torch.is_grad_enabled()
        record, saving = iteration.record, _torch.saving()
        segment = None if saving is None else saving[1]
        if training or (iteration.training and unit in iteration.turns.conditional):
            record.enter(unit, segment=segment, segments=_torch.segments)
            for owning_unit in owners:
                record.enter_sharing(owning_unit)
        elif iteration.training:
            # No graph yet: the forward of a checkpoint, which makes one when a backward runs it again; or no_grad().
            checkpoint = _torch.custom_forward()
            if checkpoint is not None:
                for other in (*owners, *unit.alive_sharing_units()):
                    raise UsageError(shared_under_reentrance(unit, other))
            record.enter_without_graph(unit, checkpoint=checkpoint, segment=segment, segments=_torch.segments)
            for owning_unit in owners:
                record.enter_sharing_without_graph(owning_unit)
        for each in (*owners, unit) if owners else (unit,):
            for handle, views, _ in each.kinds:
                if views.mode is SHOWS_SHARD:  # compute with what was written earlier in this forward
                    if each.flat_refs and not handle.flat_shows_shard:  # modules list it, and users may assign to it
                        self.setup.take_over([each])
                    if handle.state is not SHARDED and handle.writes.was_written_since_gathered:
                        self.resources.free(handle)
        return self.schedule.enters(unit)

    def _compare_turn(self, unit: Unit, *, runs: bool) -> None:
        """Check that all ranks enter `unit` next; before the first one, do what ranks have agreed on for a forward."""
        agreement, first = self.agreement, self.schedule.order.now is None
        schedule = self.setup.words_of_choices  # read at every unit
        if schedule is None:
            schedule = self.setup.description
        for observe in self.observers.before_first_gather if first else ():
            if words := observe():
                schedule += f"; {words}" if schedule else words
        # Ranks compare whether a gather is issued here: in another structure of calls, or with an output that needs no
        # gradient on one of them, the same unit is still gathered there, and they would wait for each other.
        gathered = RUNS if runs else ""
        for each in (*unit.owning_units, unit) if unit.owning_units else (unit,):
            # A prefetched one has not been waited for yet; one without handles has no state.
            if each.handles and each.handles[0].state is UNSHARDED and each.resolved.reshards_after_forward:
                if each is not unit:
                    gathered += with_unsharded(each.label)
                elif not (runs or unit in self.iteration.requested):
                    gathered += STAYED
        agreement.check_order(unit.position.index, schedule=schedule, gathered=gathered)
        if first and not agreement.forwards_are_local:
            # These communicate: all ranks are known to be here, and none has gathered yet.
            units = self.setup.units
            follow_other_ranks(units, agreement)
            for act in self.observers.first_gather_agreed:
                act()

    # -- a forward of a unit -----------------------------------------------------------------------------------------

    def run(
        self,
        unit: Unit,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        call: Callable[..., Any],
        entry: nn.Module | None = None,
        stays: bool = True,
    ) -> Any:
        """Run `call`, a forward or another method of the module of `unit`, with unsharded parameters. Collective over
        the shard axis.

        `entry`: the one of several that runs. `stays`: whether the unit stays unsharded if it is trained and no output
        requires a gradient.
        """
        if _functorch.in_transform() or (_functorch.modes_active() and _functorch.in_checkpoint()):
            return self._run_outside(unit, args, kwargs, call, entry=entry, stays=stays)
        if self.iteration.depth == 0 and self.observers.begin_step(unit):
            return self.run(unit, args, kwargs, call=call, entry=entry, stays=stays)
        if unit.phase is SUMMONED:
            return unit.run_summoned(unit, args, kwargs, call)
        iteration = self.iteration
        outermost = iteration.depth == 0
        if outermost:
            self._begin()
        iteration.depth += 1
        recomputing = _torch.graph_task() != -1  # inside a backward
        phase, again = unit.phase, unit.phase is FORWARD  # inside its own forward
        given = self.given()
        given.args, given.kwargs = args, kwargs
        try:
            unit_call, outer_dtype = self._before(unit, outermost, recomputing, given, runs=again)
            if unit.around is not None:
                call = functools.partial(unit.around, unit, call)
            output = call(*given.args, **given.kwargs)
            if not (recomputing or iteration.turns.plain):
                iteration.turns.module_ran(unit, self)
            if given.is_cast:
                given.ended(unit)
            output = _own_output(unit, output, given)
            if outer_dtype is not None:
                output = cast_floating(output, outer_dtype, in_place=given)
            if entry is not None and unit.entries.are_several and not recomputing:
                self.schedule.entry_ran(unit, id(entry))
            self._after(unit, recomputing, unit_call, given, output, stays=stays, again=again)
            for observe in () if recomputing else self.observers.forward_ended:
                observe(unit, output, outermost=outermost)
        except BaseException as error:
            given.ended(None)
            unit.phase = phase
            if recomputing:
                self.agreement.refuse(error)
            iteration.depth -= 1
            iteration.turns.leave(iteration.depth)
            if not iteration.depth:
                self._end(unit, failed=True)
            raise
        if recomputing or again:
            unit.phase = phase  # of its backward, or of the forward around this one
            for each in (*unit.owning_units, unit) if again else ():
                each.wait_unshard()  # which goes on computing with the leaves
        elif unit.phase is FORWARD:
            unit.phase = IDLE
        else:
            unit.enter_phase(IDLE)
        iteration.depth -= 1
        if not iteration.turns.plain:
            iteration.turns.leave(iteration.depth)
        if not iteration.depth:
            self._end(unit)
        return output

    def _run_outside(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any], **how: Any
    ) -> Any:
        """`run`, called inside of transforms or selective checkpoints. [Note: transforms]"""
        called = functools.partial(_functorch.inside, call)
        with _functorch.outside():
            return self.run(unit, args, kwargs, call=called, **how)

    def _before(
        self, unit: Unit, outermost: bool, recomputing: bool, given: Given, *, runs: bool
    ) -> tuple[ForwardCall | None, torch.dtype | None]:
        """Gather `unit`, and cast its inputs; the second item is the dtype to which outputs are cast back. `runs`: it
        is called inside of its own forward."""
        if self.iteration.stage in ENDED_BADLY and not recomputing:
            self._end_inner_failure()
        if recomputing and unit.has_gradients():
            unit.leaves.single_use = False  # parameters are read after their gradients have arrived
        if FORWARD in PHASE_STEPS[unit.phase]:
            unit.phase = FORWARD  # as `enter_phase`, without a call for every unit
        else:
            unit.enter_phase(FORWARD)
        if outermost:
            self._forget_autocast()
        turns = self.iteration.turns
        if recomputing:
            self._gather_again(unit)
        elif turns.plain or not turns.enter(unit, self):
            self.iteration.executor.do(self.take_turn(unit, runs=runs))
        for each in (*unit.owning_units, unit) if unit.owning_units else (unit,):
            each.wait_unshard()
        for handle in unit.handles:
            handle.face.follow_requires_grad()
        self.resources.events.append(("forward", unit.position.name, unit.phase._value_))
        outer_dtype = given.dtype if unit.built.island else unit.built.output_dtype
        if outermost or unit.built.island or unit.resolved.input_dtype is not None:
            self._substitute(unit, outermost, given)
        if not recomputing:
            for observe in self.observers.forward_begins:
                observe(unit, (given.args, given.kwargs), outermost=outermost)
        if not torch.is_grad_enabled():
            return None, outer_dtype
        of_unit = self.backwards.of_unit
        for each in (unit, *unit.owning_units) if unit.owning_units else (unit,):  # an owner may not run itself
            for handle, hooked in zip(each.handles, each.leaves.hooked, strict=True):
                if len(hooked) != len(handle.leaves):
                    _watch_leaves(each, of_unit[each])
                    break
        timed = not recomputing and unit not in turns.conditional
        began = self.iteration.record.entered_at if timed else None
        return self.gradient_flow.watch_inputs(unit, of_unit[unit], given.trained(), began), outer_dtype

    def _substitute(self, unit: Unit, outermost: bool, given: Given) -> None:
        """Give the forward of `unit` inputs on its device and in its dtype."""
        dtype = None if unit.in_full_precision else unit.resolved.input_dtype
        if dtype is None and unit.built.island:
            dtype = unit.handles[0].shard.dtype if unit.handles else torch.float32
        if outermost or dtype is not None:
            given.substitute(device=self.resources.device.device if outermost else None, dtype=dtype)

    def _forget_autocast(self) -> None:
        """Drop autocast's copies of weights, which it keeps for leaves until its context ends.

        At the start of a forward they may be older than the optimizer's last step; without a graph that needs them,
        they would hold the whole model unsharded.
        """
        if torch.is_autocast_enabled(self.resources.device.device.type):
            torch.clear_autocast_cache()

    def _after(
        self,
        unit: Unit,
        recomputing: bool,
        call: ForwardCall | None,
        given: Given,
        output: Any,
        *,
        stays: bool,
        again: bool,
    ) -> None:
        """`stays`: whether the unit stays unsharded if it is trained and no output requires a gradient; `again`: it
        does, for the forward around this one."""
        if self.iteration.stage in ENDED_BADLY and not recomputing:
            self._end_inner_failure()
        training, turns = torch.is_grad_enabled(), self.iteration.turns
        if not training:
            self._forget_autocast()
        reached = keep = False
        if training:
            if type(output) is torch.Tensor:
                outputs = [output] if output.requires_grad else []
            else:
                outputs = list(filter(_REQUIRES_GRAD, tensors_in(output)))
            if made := given.made():
                returned = set(map(id, outputs))
                outputs += [tensor for tensor in made if id(tensor) not in returned]
            watches: Sequence[object] = [None] * len(outputs)
            if call is not None and call.watch is not None:
                call, watches = call.let_go(outputs)
            held, running = self.backwards.of_unit[unit], self.iteration.record.running
            for each, watch in zip(outputs, watches, strict=True):
                self.gradient_flow.hook_output(each, held, call, running, watch)
            if _functorch.left.interpreters:
                outputs += self._hook_outer_levels(unit, output)
            if call is not None and call.outlasts:
                call.outlasts = len(outputs) > 1 and unit.has_frozen
            reached = bool(outputs)
            keep = stays and not reached and not recomputing and bool(unit.trainable_leaves())
            if keep:
                self._keep_unsharded(unit)
        if recomputing:
            return
        if not turns.plain:
            by_any = turns.ran(unit, reached=reached)
            if by_any is None:
                return
            reached = by_any
        iteration, keep = self.iteration, keep or again
        iteration.executor.do(
            self.schedule.finished(iteration.record, unit, training=iteration.training, reached=reached, keep=keep)
        )

    def _hook_outer_levels(self, unit: Unit, output: Any) -> list[torch.Tensor]:
        """Inside of transforms: hook the tensors of `output` in the outer transforms, and outside of all of them."""
        outer = [each for tensor in tensors_in(output) for each in _functorch.levels_of(tensor)[1:]]
        outer = [each for each in outer if each.requires_grad]
        for each in outer:
            held, running = self.backwards.of_unit[unit], self.iteration.record.running
            self.gradient_flow.hook_output(each, held, None, running, None)
        return outer

    def _keep_unsharded(self, unit: Unit) -> None:
        for handle in unit.handles:
            handle.face.check_missing(range(len(handle.leaves)))
        cause = (
            f"unit {unit.label} has trainable parameters, but its forward returned no tensor that requires a "
            "gradient (or returned it inside an object that flatfsdp cannot inspect). "
        )
        remedy = (
            "Return tensors in tuples, lists, dicts or dataclasses, or call it under torch.no_grad() if it needs no "
            "gradient"
        )
        if unit in self.iteration.turns.conditional:
            raise UsageError(f"{cause}{self.iteration.turns.never_stay} {remedy}")
        if is_new("unanchored", of=unit):
            self.agreement.warn(f"{cause}It stays unsharded until the end of backward. {remedy}")
        unit.backward.keep_unsharded = True
        unshard_at_first_gradient(unit, self.backwards.of_unit[unit])


def _watch_leaves(unit: Unit, held: UnitHooks) -> None:
    for kind, handle in enumerate(unit.handles):
        watched = unit.leaves.hooked[kind]
        if len(watched) == len(handle.leaves):
            continue
        for index, leaf in enumerate(handle.leaves):
            if leaf.requires_grad and index not in watched:
                watched[index] = unit.grads[kind].hooks.watch(leaf, GradientHook(held, kind, index))


def unshard_at_first_gradient(unit: Unit, held: UnitHooks) -> None:
    """Begin the backward of `unit` when the first of its gradients is about to arrive, if it has not begun before."""
    _watch_leaves(unit, held)

    def reached() -> None:
        unit, driver = held.unit(), held.driver()
        if unit is not None and driver is not None and unit.phase is IDLE:
            driver.before_backward(unit)

    known = unit.leaves.before_first
    for leaf in unit.trainable_leaves():
        if id(leaf) not in known:
            known.add(id(leaf))
            hooks.before_leaf(leaf, reached)


def _own_output(unit: Unit, output: Any, given: Given) -> Any:
    """`output` with copies of tensors that are views of unsharded parameters, whose memory is about to be freed."""
    occupied: set[int] = set()
    for each in (unit, *unit.owning_units) if unit.owning_units else (unit,):
        each.guard.check_computed(each)
        for handle in each.handles:
            if handle.state is UNSHARDED and handle.unsharded.buffer is not None:
                occupied.add(handle.unsharded.flat.data_ptr())
                if handle.unsharded.has_inner:
                    occupied.update(handle.unsharded.inner_addresses())
    occupied.discard(0)
    if not occupied:
        return output

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return _functorch.inside(tensor.clone) if _storage_pointer(tensor) in occupied else tensor

    return own(output) if type(output) is torch.Tensor else map_tensors(own, output, in_place=given)


def _storage_pointer(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have no storage of their own
        unwrapped = _functorch.levels_of(tensor)[-1]
        return -1 if unwrapped is tensor else _storage_pointer(unwrapped)
