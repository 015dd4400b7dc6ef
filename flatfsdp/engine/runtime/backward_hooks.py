"""The driver of backwards, called by autograd hooks: the begin of a backward, and the backward of each unit.

[Note: arrivals in a unit] A unit's backward begins when the gradient of one of its outputs has arrived (an *anchor*),
and has finished when its gradients, and those of its inputs, have arrived.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from ...errors import InternalError, UsageError, fail
from ..base import _functorch, _torch
from ..base import autograd as hooks
from ..base.events import Observers
from ..base.peers import Peers
from ..flat.faces import own_grad, set_own_grad
from ..flat.states import FORWARD, IDLE, POST_BACKWARD, PRE_BACKWARD, STEPPED, SUMMONED, UNSHARDED
from ..schedule.backward_schedule import BackwardSchedule, UnitRules
from ..schedule.forward_schedule import ForwardRecord
from . import late_gradients
from .backward import Backward, rules_of
from .finish import Finisher
from .iteration import FAILED, Iteration
from .model_facts import Flags, backward_plan, trained
from .setup import Setup
from .unit import Unit, follow_requires_grad, refuse_without_model, shared_under_reentrance
from .unit_collectives import UnitCollectives
from .unit_state import ForwardCall

Exceptions = tuple[bool, Mapping[Unit, UnitRules[Unit]]]


@dataclass(eq=False)
class BackwardHooks:
    """Drives the backwards of one model.

    Attributes:
        sync: False inside `no_sync()`.
        weight: the factor of this rank's gradients in the mean over ranks. [Note: uneven inputs]
        iteration: of the model.
        schedule: decides on the collectives of each backward; another one may be given.
        of_unit: the object that the hooks on tensors of each unit hold.
    """

    setup: Setup
    iteration: Iteration
    agreement: Peers
    observers: Observers
    coalescer: UnitCollectives
    sync: bool = True
    weight: float = 1.0
    schedule: type[BackwardSchedule[Unit]] = BackwardSchedule
    of_unit: dict[Unit, UnitHooks] = field(default_factory=dict)
    # A cache by `sync`, and the version of the options for which it is valid.
    _exceptions_by_sync: dict[bool, Exceptions] = field(default_factory=dict)
    _exceptions_version: int = -1
    _hooks_as_of: int = -1  # when hooks of users were last looked at, of all units

    def attach(self, unit: Unit) -> None:
        """Drive the backwards of `unit`."""
        self.of_unit[unit] = UnitHooks(unit, self)

    def adopt(self, unit: Unit, other: BackwardHooks) -> None:
        """Drive the backwards of `unit`, which `other` has driven."""
        self.of_unit[unit] = other.of_unit[unit]
        self.of_unit[unit].driver = weakref.ref(self)

    # -- a backward --------------------------------------------------------------------------------------------------

    def begin(self, unit: Unit) -> Backward:
        """The running backward, which reaches `unit`; its first hook plans it."""
        for observe in self.observers.backward_reaches:
            observe()
        iteration = self.iteration
        if iteration.backward is not None:
            schedule = iteration.backward.schedule
            schedule.double = schedule.double or torch.is_grad_enabled()
            if RemovableHandle.next_id != self._hooks_as_of:  # torch counts all hooks that are registered
                for look in self.observers.backward_begins:
                    look((unit,))
            return iteration.backward
        if not _torch.in_backward():
            raise InternalError(f"unit {self.setup.outermost.label}: a gradient arrived outside of a backward")
        self.observers.begin_step(None)
        if iteration.stage is FAILED:  # the same graph again, after a backward that failed
            iteration.finish_interrupted()
        if iteration.pending is not None:  # checked here: one call less in each step
            iteration.wait_for_gradients()
        if iteration.requested:
            iteration.follow_requests()
        record = iteration.record
        with _torch.as_plain_tensors():  # leaves may be hidden
            follow_requires_grad(self.setup.units)
            flags = {unit: trained(unit) for unit in record.anchored}
        backward = self._plan(record, flags)
        record.consumed = True
        iteration.begin_backward(backward)
        if backward.schedule.brings:
            backward.collect(watched=bool(self.observers.gradient_came))
        for look in self.observers.backward_begins:
            look(self.setup.units)
        self._hooks_as_of = RemovableHandle.next_id
        with _torch.as_plain_tensors():
            for grads in [grads for unit in record.begun for grads in unit.grads]:
                grads.stash_grads()
        self._expect_accumulated(backward)
        backward.schedule.expect(*[unit for unit, each in flags.items() if any(map(any, each))])
        backward.join_reductions()
        if backward.schedule.double:
            for unit in record.begun:
                self._begin_before_gradients_of(unit)
        return backward

    def _begin_before_gradients_of(self, unit: Unit) -> None:
        """From now on, begin a backward before it accumulates gradients of `unit`, at the latest: in the graph of a
        backward they may come before any gradient of the unit's outputs, and `.grad` is to be taken away before."""
        held, known = self.of_unit[unit], unit.leaves.before_any

        def begin(grad: torch.Tensor) -> None:
            unit, driver = held.unit(), held.driver()
            if unit is not None and driver is not None and unit.phase is IDLE and driver.iteration.backward is None:
                driver.begin(unit)

        for leaf in unit.trainable_leaves():
            if id(leaf) not in known:
                known.add(id(leaf))
                hooks.before_gradients_of(leaf, begin)

    def _plan(self, record: ForwardRecord[Unit], flags: dict[Unit, Flags], *, accumulated: bool = False) -> Backward:
        """A backward over `record`, compared with those of other ranks. `flags`: which parameters are trained.
        `accumulated`: it reduces the gradients of earlier ones."""
        sync, rules = self._exceptions()
        backward = Backward(
            record,
            rules=rules,
            sync=sync,
            weight=self.weight,
            agreement=self.agreement,
            coalescer=self.coalescer,
            finisher=self._finisher(sync=sync),
            turns=self.iteration.turns,
            schedule=self.schedule,
        )
        backward.schedule.brings = accumulated or backward.may_bring(self.setup.units)
        self._compare(record, flags, brings=backward.schedule.brings, reduces=sync)
        for observe in self.observers.backward_agreed:
            observe(reduces=sync)
        if self.iteration.is_at_rest:  # a graph older than the last rest
            self.iteration.follow_writes()
        return backward

    def _expect_accumulated(self, backward: Backward) -> None:
        """Let gradients that earlier backwards have left take part in the reductions of `backward`."""
        for unit in self.setup.units:
            for grads in unit.grads:
                if grads.accumulation.pending and unit.phase is not FORWARD:  # with this backward inside
                    backward.schedule.expect(unit)

    def reduce_accumulated(self) -> None:
        """Reduce the gradients of backwards without synchronization, as a backward without gradients does. Collective.

        Precondition: no forward or backward runs.
        """
        iteration = self.iteration
        self.observers.begin_step(None)
        iteration.finish_interrupted()
        iteration.wait_for_gradients()
        follow_requires_grad(self.setup.units)
        backward = self._plan(ForwardRecord(), {}, accumulated=True)
        for look in self.observers.backward_begins:
            look(self.setup.units)
        self._expect_accumulated(backward)
        backward.join_reductions()
        iteration.run_without_graph(backward)

    def _finisher(self, *, sync: bool) -> Finisher:
        """The finisher of the backward that begins."""
        made = [found for make in self.observers.finisher if (found := make(sync=sync)) is not None]
        return made[-1] if made else Finisher()

    def _compare(self, record: ForwardRecord[Unit], flags: dict[Unit, Flags], *, brings: bool, reduces: bool) -> None:
        """Compare the beginning backward over `record` between ranks. `flags`: which parameters require a gradient;
        `brings`: whether it brings any."""
        setup, sync = self.setup, self.sync
        retained = tuple(
            unit.position.index
            for unit in setup.units
            if unit.kept.retain is not None
            and any(handle.kept_source is not None and handle.kept_source.as_of_forward for handle in unit.handles)
        )
        begun, anchored = record.entered, record.anchored
        # Hashed at every step: units by identity, and no dict.
        plan = sync, brings, begun, anchored, (tuple(flags), tuple(flags.values())), retained, setup.description
        self.agreement.check_backward(
            plan,
            lambda: backward_plan(sync, brings, begun, anchored, flags, retained, setup.description),
            reduces=reduces and brings,
        )

    def _exceptions(self) -> Exceptions:
        """Whether units reduce gradients in the next backward, and the rules of all units for its schedule."""
        known = self._exceptions_by_sync
        if self._exceptions_version != self.setup.version:
            self._exceptions_version = self.setup.version
            known.clear()
        if (found := known.get(self.sync)) is None:
            rules = {u: rules_of(u, reduces=self.sync and u.options.schedule.reduce) for u in self.setup.units}
            found = known[self.sync] = any(rule.reduces for rule in rules.values()), rules
        return found

    # -- a unit's backward -------------------------------------------------------------------------------------------

    def before_backward(self, unit: Unit, call: ForwardCall | None = None) -> None:
        """A gradient is about to flow into `unit`: unshard it and await its gradients. Collective over the shard
        axis."""
        if unit.phase is SUMMONED:
            raise UsageError(
                f"unit {unit.label}: backward inside summon_full_params() would reduce gradients of parameters that "
                "are written back later; leave the context first"
            )
        if unit.phase is FORWARD:
            _refuse_inside_forward(unit)
        backward, own = self.begin(unit), unit.backward
        schedule = backward.schedule
        for observe in self.observers.unit_reached:
            observe(unit)
        if call is None:
            self._await_unseen_end(unit)
        if unit in schedule.completed and (unit in schedule.finished or _is_done_reading(unit, backward)):
            return
        if unit.phase is STEPPED:
            unit.enter_phase(PRE_BACKWARD)  # the table refuses this, before anything is gathered
        if call is not None and call.finished_in_task == _torch.graph_task():
            call = None  # this output is also one of its inputs, whose gradient has shown the end
            if unit in schedule.expecting and not (unit.is_unsharded or schedule.gathers.has_turn(unit)):
                return  # freed when that call had finished
        begun = unit.phase is PRE_BACKWARD
        if not self._must_gather(unit, call, backward):
            return
        for handle in unit.handles:
            if handle.state is UNSHARDED:
                unit.guard.check_used(unit)
                break
        if call is None and _may_be_read_after_its_gradients(unit, backward):
            own.keep_unsharded = True
        inner = _torch.graph_task() != backward.task
        self.iteration.executor.do(schedule.reached(unit, inner=inner), backward)
        if not (unit in schedule.completed or begun):
            share = backward.is_over_with_gradients(unit)
            backward.participate(unit, share=share)
            if share and call is not None and call.on_device and not unit.built.counts_gradients:
                backward.muted.append(unit)
                for grads in unit.grads:
                    grads.mute()
        unit.enter_phase(PRE_BACKWARD)
        unit.record_event("backward")

    def _await_unseen_end(self, unit: Unit) -> None:
        """The backward of a call begins whose end nothing will show: await custom Functions on the way, which may run
        segments of the unit again and bring more gradients."""
        nodes = unit.backward.ends_unseen
        nodes.append(_torch.node_now())
        if unit.leaves.runs_late is not False and (unit.owning_units or unit.trainable_leaves()):
            late_gradients.await_customs(unit, nodes[-1:], self.of_unit[unit].custom_ran)

    def _must_gather(self, unit: Unit, call: ForwardCall | None, backward: Backward) -> bool:
        """The backward of `call` begins, None for one whose end nothing will show: whether it needs parameters of
        `unit` that may not be unsharded."""
        own = unit.backward
        begun, task, completed = unit.phase is PRE_BACKWARD, _torch.graph_task(), backward.schedule.completed
        opens = call is not None and call not in own.open_calls
        if call is not None and opens:
            own.open_calls.add(call)
            own.keep_unsharded = own.keep_unsharded or call.outlasts
        # Gradients that have arrived do so again, from a segment that another graph task recomputes.
        if (opens and task != backward.task) or (
            unit in completed and own.task != task and (opens or not (begun or call is not None))
        ):
            late_gradients.expect_again(unit, completed)
        if not begun or unit.is_tied:
            # Its own parameters may have been gathered for other units that share them, and shared ones of others not.
            return True
        return unit.options.schedule.unshard_in_backward and not unit.is_unsharded

    def leaf_ready(self, unit: Unit, kind: int, index: int) -> None:
        """Autograd accumulated the gradient of a leaf of `unit`, and it was not collected."""
        backward, grads = self.iteration.backward, unit.grads[kind]
        leaf = unit.handles[kind].leaves[index]
        grad = own_grad(leaf)
        set_own_grad(leaf, None)  # the next one is not added to it, nor is it taken for one of before the backward
        if backward is None or unit not in backward.schedule.expecting:
            # No output of the unit has shown this backward: a loss of what is inside of it, or of its parameters.
            if unit.phase is FORWARD:
                _refuse_inside_forward(unit)
            shows_window = grads.accumulation.window_open and unit.handles[kind].face.holders_are_leaves
            if shows_window and not grads.is_stashed:
                _refuse_added_to_window(unit, kind, index)
            backward = self.begin(unit)
            backward.participate(unit)
            unit.enter_phase(PRE_BACKWARD)
        own, completed = unit.backward, backward.schedule.completed
        if grad is None:
            return
        self._count(unit, kind, index, backward)
        if not backward.schedule.brings:
            backward.bring()
            backward.collect(watched=bool(self.observers.gradient_came))
        for observe in self.observers.gradient_came:
            observe(unit, kind, index, grad)
        grads.arrive(index, grad.detach() if grad.requires_grad else grad)
        del grad  # moved, or collected: the following code may allocate memory
        if unit in completed:
            if unit.phase is STEPPED:
                unit.enter_phase(PRE_BACKWARD)
            if any(each.participates for each in unit.grads):
                backward.schedule.expect(unit)  # a late one: a second reduction, at the end of the backward
        else:
            grads.let_collect(backward.collecting)
        if (unit in completed or not grads.missing) and not own.open_calls:
            self.advance(unit)

    def _count(self, unit: Unit, kind: int, index: int, backward: Backward) -> None:
        """A gradient of a leaf has come: how often it does, and in which graph task, shows whether more will come, and
        whether parameters are read after their gradients have come."""
        own, grads, task = unit.backward, unit.grads[kind], _torch.graph_task()
        completed = unit in backward.schedule.completed
        again = index in grads.arrived
        if again:
            grads.repeats = True
        if (again or task != backward.task) and unit.leaves.single_use is not False:
            unit.leaves.single_use = False
            for each in unit.grads:
                each.stop_sharing()
        if again or completed:
            own.late_gradients -= 1
        if task == own.task:
            if own.arrived_in_inner_tasks:
                own.arrived_in_inner_tasks.discard((kind, index))
            return
        if not completed and (not again or index in grads.missing):  # missing: `own.task` has yet to contribute
            own.arrived_in_inner_tasks.add((kind, index))
        _check_recomputed_region(unit, backward)
        late_gradients.came(unit, self.of_unit[unit].custom_ran)

    def inputs_ready(self, unit: Unit, call: ForwardCall) -> None:
        """The gradients of the inputs of one call of `unit` have arrived."""
        own, backward = unit.backward, self.iteration.backward
        own.open_calls.discard(call)
        call.finished_in_task = _torch.graph_task()
        if backward is None:
            return
        schedule = backward.schedule
        if call.began is not None and call.began == schedule.clock.began.get(unit):
            schedule.finished.add(unit)
        if unit in schedule.expecting:
            # Reduce now if all gradients of this backward have arrived, and reshard if nothing reads the parameters.
            for grads in unit.grads:
                if grads.muted:
                    unit.pick_up_grads(sound=True)
                    break
            for grads in unit.grads:
                if grads.missing and not (own.open_calls or unit in schedule.completed):
                    _skip_missing(unit, backward)
                    break
            self.advance(unit)

    def advance(self, unit: Unit) -> None:
        """Reduce `unit` when every gradient has arrived, and reshard, unless this backward may still read the
        parameters."""
        own, backward = unit.backward, self.iteration.backward
        if own.open_calls or backward is None or unit not in backward.schedule.expecting:
            return
        schedule, completed = backward.schedule, unit in backward.schedule.completed
        expecting = missing = False
        for grads in unit.grads:
            expecting = expecting or bool(grads.expected)
            missing = missing or bool(grads.missing)
        no_more_late = own.late_gradients <= 0
        if expecting and not completed and not missing and no_more_late:
            # All have come once. Some may come again: a contribution from a reentrant checkpoint inside of the unit, or
            # from a call whose end nothing shows.
            if own.arrived_in_inner_tasks and late_gradients.awaits_more(unit):
                return
            if unit.leaves.runs_late is not False and own.runs_again(unit.leaves.customs):
                return
            unit.enter_phase(POST_BACKWARD)
            unit.record_event("grads")
            in_use = own.keep_unsharded or (bool(unit.sharing_units) and _is_in_use(unit))
            self.iteration.executor.do(schedule.completes(unit, in_use=in_use), backward)
            # For later backwards: this one may still show otherwise.
            if unit.leaves.single_use is None and any(grads.arrived for grads in unit.grads):
                unit.leaves.single_use = True
            if unit.leaves.runs_late is None:
                unit.leaves.runs_late = False
        elif no_more_late and not _is_in_use(unit):
            # A call of the unit is over, and not all gradients have come. Those that are missing will, if this backward
            # brings any: it then needs the parameters again; in an inner task nobody knows.
            waits = expecting and (backward.in_inner_task() or schedule.brings)
            if completed or not waits:
                self.iteration.executor.do(schedule.left(unit), backward)
        for owning_unit in unit.owning_units:
            self.advance(owning_unit)


def _skip_missing(unit: Unit, backward: Backward) -> None:
    """When all calls have finished, stop waiting for gradients that this backward does not compute. Other ranks may use
    all parameters: they reduce now, and gather the next unit only after this rank has reduced, too."""
    if backward.in_inner_task() or not backward.schedule.brings:
        return
    for handle, _, grads in unit.kinds:
        grads.missing.difference_update([i for i in grads.missing if not hooks.will_accumulate(handle.leaves[i])])


def _refuse_inside_forward(unit: Unit) -> NoReturn:
    raise UsageError(
        f"unit {unit.label}: a backward inside its own forward reaches its parameters, which are in use until the "
        "forward ends. Such a backward may only go through units whose forward is over: wrap the modules that it goes "
        "through as separate units, or call backward() after the forward"
    )


def _refuse_added_to_window(unit: Unit, kind: int, index: int) -> NoReturn:
    """A gradient came before a backward had begun that takes `.grad` away, where this shows a window."""
    fail(
        UsageError(
            f"unit {unit.label}: the first gradient of this backward is that of parameter "
            f"{unit.handles[kind].layout.params[index].name!r}, and no output of the unit has a part in the loss. So "
            "autograd has added it to what was accumulated under no_sync(). Return the tensor that the loss uses from "
            "the unit's forward, or call backward() on the sum of both losses"
        )
    )


def _check_recomputed_region(unit: Unit, backward: Backward) -> None:
    """A segment of `unit` that a reentrant checkpoint recomputed brought a gradient."""
    for other in (*unit.owning_units, *unit.alive_sharing_units()):
        fail(UsageError(f"a part of {shared_under_reentrance(unit, other)}"))
    if unit in backward.schedule.completed and unit in backward.schedule.clock.in_passes and unit in backward.reduced:
        fail(
            UsageError(
                f"unit {unit.label}: a part of it that was recomputed by a reentrant checkpoint brought a gradient "
                "after the unit's gradients had been reduced. The unit ran in several forwards before this backward, "
                "and no backward so far recomputed such a part of it, so other ranks do not expect another reduction. "
                "Use checkpoint(..., use_reentrant=False), or call backward() after each forward"
            )
        )


def _may_be_read_after_its_gradients(unit: Unit, backward: Backward) -> bool:
    """Whether parameters of `unit` may be read after all of its own gradients have arrived: recomputation inside reads
    all of them, units that share some read these, and frozen ones propagate gradients to other tensors: of units
    inside, of units whose parameters it shares, and to a leaf that its module has created."""
    if unit.encloses_others and (backward.schedule.clock.recomputes or unit.sharing_units):
        return True
    if not unit.has_frozen:
        return False
    own = unit.trainable_leaves()
    return (
        not own
        or unit.encloses_others
        or bool(unit.owning_units)
        or hooks.flows_past(unit.backward.ends_unseen[-1:], own)
    )


def _is_done_reading(unit: Unit, backward: Backward) -> bool:
    """Whether the running backward has read all parameters that modules of `unit` hold, as far as their gradients show:
    each has arrived, or is not computed by this backward.

    An output may be reached later than that: hidden states that are returned next to the output of a head, or an input
    that is returned. Other ranks may not reach it, so nothing is gathered for it.
    """
    if backward.in_inner_task() or backward.schedule.awaits_own_call(unit):
        return False
    return all(map(late_gradients.has_all, (unit, *unit.owning_units)))


def _is_in_use(unit: Unit) -> bool:
    """Whether the parameters of `unit` are still needed after its backward."""
    if unit.backward.keep_unsharded:
        return True
    return bool(unit.sharing_units) and any(each.backward.open_calls for each in unit.alive_sharing_units())


class UnitHooks:
    """The object that the hooks on tensors of one unit hold: weak references to the unit, and to the `BackwardHooks` of
    its model. Hooks outlive steps, and those on leaves outlive the model."""

    def __init__(self, unit: Unit, driver: BackwardHooks) -> None:
        self.unit = weakref.ref(unit)
        self.driver = weakref.ref(driver)

    def leaf_ready(self, kind: int, index: int, leaf: torch.Tensor) -> None:
        """Autograd accumulated the gradient of a leaf: move it to its slot; after the last one, reduce and reshard."""
        unit, driver = self.unit(), self.driver()
        if unit is None:
            return
        if driver is None:
            refuse_without_model(unit)
        grads, grad = unit.grads[kind], own_grad(leaf)
        missing, collected = grads.missing, grads.slots.collected
        first = index in missing and index not in collected
        if grad is None or not first or grads.collects_in != _torch.graph_task():
            del grad, collected  # what follows may allocate memory
            driver.leaf_ready(unit, kind, index)
            return
        # Most gradients only wait here for those of the same unit: `Gradients.arrive`, without its calls.
        set_own_grad(leaf, None)
        missing.remove(index)
        grads.arrived.add(index)
        collected[index] = grad
        del grad, collected
        if not (missing or unit.backward.open_calls):
            driver.advance(unit)

    def inputs_ready(self, call: ForwardCall) -> None:
        """The gradients of the inputs of one call have arrived."""
        unit, driver = self.unit(), self.driver()
        if unit is None:
            return
        if driver is None:
            refuse_without_model(unit)
        driver.inputs_ready(unit, call)

    def custom_ran(self) -> None:
        """A backward has finished a custom Function, which may have computed the last gradients."""
        unit, driver = self.unit(), self.driver()
        backward = driver.iteration.backward if driver is not None else None
        if not (unit is None or driver is None or backward is None or unit in backward.schedule.completed):
            driver.advance(unit)


class GradientHook(hooks.LeafHook):
    """The hook on one leaf of a unit, to whose hooks it refers weakly."""

    __slots__ = ("_index", "_kind", "_of_unit")

    def __init__(self, of_unit: UnitHooks, kind: int, index: int) -> None:
        self._of_unit = weakref.ref(of_unit)
        self._kind, self._index = kind, index

    def __call__(self, leaf: torch.Tensor) -> None:
        of_unit = self._of_unit()
        if of_unit is not None:
            of_unit.leaf_ready(self._kind, self._index, leaf)


class OutputHook:
    """The units that are notified when a gradient reaches one tensor.

    Attributes:
        readers: units with this input, and their calls, whose backward has finished then.
        returners: units that returned it, whose backward begins then: the last, around or after the others, first.
        task: the last graph task in which a gradient reached it.
        id: of the hook on the tensor, by which it is known that no in-place operation has replaced the value since.
    """

    readers: list[tuple[UnitHooks, ForwardCall]]
    returners: list[tuple[UnitHooks, ForwardCall | None]]
    task: int | None = None  # defaults in the class instead of a constructor: every output of a unit has one
    id = 0

    def reached(self, grad: object, held: object = None) -> None:
        """A gradient has arrived. `held`: lives as long as the graph.

        Raises:
            UsageError: a unit or its model was deleted.
        """
        if _functorch.in_transform():  # a backward inside of it
            with _functorch.outside():
                return self.reached(grad)
        self.task = _torch.graph_task()
        for reader, call in self.readers:  # they reshard before anything is gathered
            if (unit := reader.unit()) is not None:
                if (driver := reader.driver()) is None:
                    refuse_without_model(unit)
                driver.inputs_ready(unit, call)
        for returner, returned in self.returners:
            if (unit := returner.unit()) is None:
                fail(
                    UsageError(
                        "a backward through a wrapped module whose wrapper has been deleted since its forward, as in "
                        "FullyShardedDataParallel(module)(x).sum().backward(): nothing would average the gradients. "
                        "Keep a reference to the wrapper until the backward is over"
                    )
                )
            if (driver := returner.driver()) is None:
                refuse_without_model(unit)
            driver.before_backward(unit, returned)

    def reached_past_it(self, grad: object) -> None:
        """A gradient has reached the base of the tensor, a view; ignored if one has reached the view in this task."""
        if self.task != _torch.graph_task():
            self.reached(grad)
