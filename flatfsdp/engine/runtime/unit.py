"""One unit: what happens around the forward and the backward of a wrapped module.

[Note: arrivals in a unit] A unit's backward begins when the gradient of one of its outputs is there (an *anchor*), and
is over when its gradients, and those of its inputs, are.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...api import BackwardPrefetch
from ...errors import ConfigValueError, UsageError, is_new
from ..agreement.once_per_job import warn_once_per_job
from ..base import _torch
from ..base import autograd as hooks
from ..base.nested_tensors import cast_floating, map_tensors, move, tensors_in
from ..comm.comm_hook import left_to_average
from ..flat.buffer_casting import cast_buffers
from ..flat.flat_param import FlatParamHandle
from ..flat.param_refs import ParamRef
from ..flat.states import FORWARD, IDLE, POST_BACKWARD, PRE_BACKWARD, STEPPED, SUMMONED, UNSHARDED
from ..flat.views import SHOWS_GUARDED, SHOWS_UNSHARDED, check_exposed, check_unwritten, keep_packed
from ..schedule.forward_record import ForwardPass
from .gradient_counter import GradientCounter
from .unit_data import UnitData, check_hooks

if TYPE_CHECKING:
    from .backward import Backward
    from .model import Root

_REQUIRES_GRAD = attrgetter("requires_grad")


class ForwardCall:
    """One forward of a unit: a name for what its backward still has to do.

    The anchors of its outputs hold it, and with it `handle`, what watches its inputs; the inputs' hooks hold it weakly
    ([Note: arrivals]).

    Attributes:
        began: when, in ticks of the record's clock; None where that tells nothing.
        finished_in_task: the graph task in which it was over last. An output that is reached later is what it was
            given.
        outlasts: it may go on when the gradients of its inputs are there: those of leaves come before those of outputs
            that were not computed from them.
    """

    __slots__ = ("__weakref__", "began", "finished_in_task", "handle", "outlasts")

    def __init__(self, began: int | None) -> None:
        self.began = began
        self.handle: object = None
        self.finished_in_task: int | None = None
        self.outlasts = False


class Unit(UnitData):
    """One wrapped module with the parameters that no nested unit owns.

    Attributes:
        modules: the modules of this unit, whose buffers it computes with.
        island: a full-precision module (batch norm) in a low-precision model: inputs are widened, outputs narrowed
            again.
        completed: every gradient that the running backward awaits has arrived.
        backward_finished: the running backward is over with the first call, and so with all.
        single_use: whether each gradient came once and in the backward's own graph task, as far as seen. [Note: slot
            sharing]
        keep_unsharded: nothing tells when its backward is over; unsharded until the end of the backward.
    """

    def __init__(
        self,
        module: nn.Module,
        handles: Sequence[FlatParamHandle],
        param_refs: Sequence[ParamRef],
        *,
        backward_prefetch: BackwardPrefetch | None,
        forward_prefetch: bool,
        modules: Sequence[nn.Module] = (),
        island: bool = False,
        **data: Any,
    ) -> None:
        """`data`: the other arguments of `UnitData`."""
        super().__init__(module, handles, param_refs, **data)
        self.backward_prefetch = backward_prefetch
        self._counted = GradientCounter(self) if backward_prefetch is BackwardPrefetch.BACKWARD_MID else None
        self.forward_prefetch = forward_prefetch
        self._prefetch_was_set = False  # since it was built
        self.modules = list(modules)
        self.island = island
        self._outer_dtype: torch.dtype | None = None
        # By kind: leaves that tell when their gradient is there, and all hooks that they have.
        self._watched: list[dict[int, hooks.Registry]] = [{} for _ in self.handles]
        self._first_gradient_hooks: set[int] = set()  # ids of leaves that tell before
        # Calls whose backward has begun and has not reached their inputs: something in it may still read the
        # parameters.
        self._open_calls: set[ForwardCall] = set()
        self.completed = False
        self.backward_finished = False
        self._late_gradients = (
            0  # gradients that come again, from a segment recomputed in a task of its own or after one
        )
        self._expecting_in_task = -1  # graph task
        # Leaves whose gradients only tasks inside that one brought, as (kind, index).
        self._arrived_in_inner_tasks: set[tuple[int, int]] = set()
        self.single_use: bool | None = None
        self.keep_unsharded = False
        self._encloses: bool | None = None  # whether the module has modules of others inside; found when it matters

    # -- settings ----------------------------------------------------------------------------------------------------

    def set_prefetch(self, backward: BackwardPrefetch | None, forward: bool) -> None:
        """Change what the unit was built with; ranks compare it at the next forward or backward.

        Raises:
            ConfigValueError: BACKWARD_MID, for which gradients are counted from the first forward on.
        """
        if backward is BackwardPrefetch.BACKWARD_MID and self._counted is None:
            raise ConfigValueError(
                f"backward_prefetch of unit {self.label}: got BACKWARD_MID, which counts gradients from the first "
                "forward on. Pass it to the constructor"
            )
        self.backward_prefetch, self.forward_prefetch = backward, forward
        self._prefetch_was_set = True
        self.root.options_changed()

    def describe_settings(self) -> Iterator[str]:
        """What was set since it was built, in words that are equal on all ranks."""
        yield from self.options.describe()
        if self._prefetch_was_set:
            name = self.backward_prefetch.name if self.backward_prefetch is not None else None
            yield f"backward_prefetch={name} and forward_prefetch={self.forward_prefetch}"

    # -- forward -----------------------------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, method: str | None = None) -> Any:
        """The module's forward, or another `method`, with the parameters unsharded around it. Collective over the shard
        axis."""
        root = self.root
        if root.iteration.depth == 0 and root.observers.begin_step(root, self):
            return self.run(args, kwargs, method=method)
        if self.phase is SUMMONED:
            return self._run_summoned(root, args, kwargs, method)
        outermost = root.enter(self)
        phase, recomputing = self.phase, _torch.in_backward()
        try:
            call, args, kwargs = self._before_forward(root, outermost, recomputing, args, kwargs)
            dtype = self.mixed_precision.buffer_dtype
            if dtype is not None and root.in_full_precision(self):
                dtype = None
            with cast_buffers(self.modules, dtype):
                called = self.module if method is None else getattr(self.module, method)
                output = called(*args, **kwargs)
            if root.conditional_units.cursors and not recomputing:
                root.conditional_units.finish(self)
            output = self._after_forward(root, recomputing, call, output, stays=method is None)
            if not recomputing:
                for observe in root.observers.forward_ended:
                    observe(self, output, outermost=outermost)
        except BaseException as error:
            self.phase = phase
            if recomputing:
                root.agreement.sequence.activity.refuse(error)
            root.leave(self, failed=True)
            raise
        if recomputing:
            self.phase = phase  # it returns to where its backward is
        else:
            self.enter_phase(IDLE)
        root.leave(self)
        return output

    def _run_summoned(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None) -> Any:
        """The module's forward, or another `method`, with the parameters as the user has them. No communication, but of
        units inside that are not summoned."""
        if torch.is_grad_enabled():
            raise UsageError(
                f"unit {self.label}: forward inside summon_full_params() would train on parameters that are written "
                "back later; leave the context first. Without gradients (torch.no_grad()) it may run there"
            )
        if any(views.mode is not SHOWS_UNSHARDED for unit in (self, *self.owning_units) for views in unit.views):
            raise UsageError(
                f"unit {self.label}: forward inside summon_full_params(rank0_only=True), which gives this rank no "
                "whole parameters; leave the context first, or run it on rank 0 alone with all units summoned"
            )
        args, kwargs = move((args, kwargs), root.resources.device.device)
        return (self.module if method is None else getattr(self.module, method))(*args, **kwargs)

    def participate(self) -> None:
        """Do what this unit's forward does together with other ranks, and nothing else. Collective over the shard axis.
        [Note: branches]"""
        root, phase, depth = self.root, self.phase, self.root.conditional_units.depth
        self.enter_phase(FORWARD)
        try:
            self._follow_requires_grad()
            root.gather_for_forward(self)
            root.conditional_units.finish(self)
        except BaseException:
            self.phase = phase
            raise
        finally:
            root.conditional_units.leave(depth)
        self.enter_phase(IDLE)
        self.finish_forward(reached=root.conditional_units.training)

    def _before_forward(
        self, root: Root, outermost: bool, recomputing: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ForwardCall | None, tuple[Any, ...], dict[str, Any]]:
        if recomputing and any(grads.arrived for grads in self.grads):
            self.single_use = False  # parameters are read after their gradients have come
        self.enter_phase(FORWARD)
        if outermost:
            self._forget_autocast(root)
        root.gather_for_forward(self)
        self._follow_requires_grad()
        self.record_event("forward")
        if outermost:
            args, kwargs = move((args, kwargs), root.resources.device.device)
        if self.island:
            floating = [t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()]
            self._outer_dtype = floating[0] if floating else None
            args, kwargs = cast_floating((args, kwargs), self.handles[0].shard.dtype if self.handles else torch.float32)
        dtype = self._input_dtype(root)
        if dtype is not None:
            args, kwargs = cast_floating((args, kwargs), dtype)
        if not recomputing:
            for observe in root.observers.forward_begins:
                observe(self, (args, kwargs), outermost=outermost)
        if not torch.is_grad_enabled():
            return None, args, kwargs
        self._watch_leaves()
        for owning_unit in self.owning_units:  # which may not run itself
            owning_unit._watch_leaves()
        return self._watch_inputs(root, (args, kwargs)), args, kwargs

    def _forget_autocast(self, root: Root) -> None:
        """Drop autocast's copies of weights, which it keeps for leaves until its context ends.

        At the start of a forward they may be older than the optimizer's last step; without a graph that needs them,
        they would hold the whole model unsharded.
        """
        if torch.is_autocast_enabled(root.resources.device.device.type):
            torch.clear_autocast_cache()

    def _input_dtype(self, root: Root) -> torch.dtype | None:
        wanted = (
            self.mixed_precision.cast_root_forward_inputs
            if self in root.entries
            else self.mixed_precision.cast_forward_inputs
        )
        return self.mixed_precision.param_dtype if wanted and not root.in_full_precision(self) else None

    def _follow_requires_grad(self) -> None:
        """With the flat parameter registered, its `requires_grad` is the one that users set."""
        for handle in self.handles:
            if not handle.use_orig_params:
                wanted = handle.flat_param.requires_grad
                if len(handle.trainable_indices()) != wanted * len(handle.leaves):
                    for leaf in handle.leaves:
                        leaf.requires_grad_(wanted)

    def _watch_leaves(self) -> None:
        for kind, handle in enumerate(self.handles):
            watched = self._watched[kind]
            if len(watched) == len(handle.leaves):
                continue
            for index, leaf in enumerate(handle.leaves):
                if leaf.requires_grad and index not in watched:
                    watched[index] = hooks.watch_leaf(leaf, self._counted or self, kind, index)

    def _watch_inputs(self, root: Root, inputs: Any) -> ForwardCall | None:
        """Let the inputs' gradients tell when this call's backward is over.

        The parameters' own gradients do not: frozen ones have none, and a detached use, or a segment recomputed inside
        the module, reads a parameter after its gradient has arrived. The gradient of an input that an earlier call of
        another unit read too is there only after that one's backward; it is awaited only where nothing else tells.
        """
        args, kwargs = inputs
        inputs = [tensor for tensor in tensors_in(args) if tensor.requires_grad]
        if kwargs:
            inputs += [tensor for tensor in tensors_in(kwargs) if tensor.requires_grad]
        awaited = [tensor for tensor in inputs if root.gradient_flow.first_reader(tensor, self)]
        if not awaited and self._has_frozen():
            awaited = inputs
        if not awaited:
            return None
        timed = self.options.schedule.branch is None and not _torch.in_backward()
        call = ForwardCall(root.iteration.record.entered_at if timed else None)
        me, this = weakref.ref(self), weakref.ref(call)
        if len(awaited) == 1 and root.gradient_flow.follow_output(awaited[0], me, call):
            return call

        def arrived() -> None:
            unit, known = me(), this()
            if unit is not None and known is not None:
                unit.inputs_ready(known)

        registered, call.handle = hooks.after_backward_to(awaited, arrived)
        if all(tensor.grad_fn is None for tensor in awaited):
            call.outlasts = True
            root.gradient_flow.unhook_later(registered)
        return call

    def _after_forward(
        self, root: Root, recomputing: bool, call: ForwardCall | None, output: Any, *, stays: bool
    ) -> Any:
        """`stays`: whether the unit stays whole where it is trained and no output shows it."""
        for unit in (self, *self.owning_units):
            for handle, views, _ in unit.kinds:
                check_unwritten(views, unit.name)
                if handle.options.packed and handle.state is UNSHARDED:
                    keep_packed(handle, unit.param_refs, unit.name)
        output = self._own_output(output)
        if self.island and self._outer_dtype is not None:
            output = cast_floating(output, self._outer_dtype)
        if not torch.is_grad_enabled():
            self._forget_autocast(root)
        branching = self.options.schedule.branch is not None
        reached = keep = False
        if torch.is_grad_enabled():
            output_hooks = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            for output_hook in output_hooks:
                self._hook_outputs(root, output_hook, call)
            if call is not None and call.outlasts:
                call.outlasts = len(output_hooks) > 1 and self._has_frozen()
            reached = bool(output_hooks)
            keep = stays and not reached and not recomputing and bool(self.trainable_leaves())
            if keep:
                self._stay_unsharded()
        if recomputing:
            if root.iteration.backward is not None and torch.is_grad_enabled():
                for unit in (self, *self.owning_units):
                    root.iteration.backward.expect_recomputed(unit)
            return output
        if branching:
            if root.conditional_units.training:
                root.conditional_units.ran(self, with_graph=reached)
            reached = root.conditional_units.training
            if root.conditional_units.holds(self):
                return output
        self.finish_forward(reached=reached, keep=keep)
        return output

    def finish_forward(self, *, reached: bool, keep: bool = False) -> None:
        """This unit's part of the forward is over: free it, unless it is to `keep` its parameters.

        `reached`: a gradient can come to it.
        """
        if reached:
            self.root.iteration.record.leave(self)
            for owning_unit in self.owning_units:
                self.root.iteration.record.leave(owning_unit)
        elif self.root.conditional_units.training:
            self.root.iteration.record.leave_without_graph(self)
        if keep or (self._sharing_units and self._in_use_by_sharing_unit) or not self.reshards_after_forward:
            for views in self.views:
                views.track_writes()
        else:
            self.reshard_after_forward(self)
        for owning_unit in self.owning_units:
            owning_unit.sharing_unit_finished(self)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether the unsharded parameters are freed between forward and backward.

        The root's backward begins where its forward ends: unless a user says so, freeing them would gain nothing.
        """
        chosen = self.options.schedule.reshard_after_forward
        if chosen is not None:
            return bool(chosen)
        return self.traits.reshard_after_forward and self is not self.root.unit

    def reshards_after_backward(self, *, reduced: bool) -> bool:
        """Whether the unsharded parameters are freed after a backward that `reduced` gradients or did not."""
        chosen = self.options.schedule.reshard_after_backward
        return chosen if chosen is not None else reduced or self.traits.reshard_without_sync

    def _hook_outputs(self, root: Root, output: torch.Tensor, call: ForwardCall | None) -> None:
        """Begin this unit's backward when the gradient of `output` is there; that of its readers is over then."""
        output_hook = root.gradient_flow.output_hook(output)
        output_hook.returners.insert(0, (weakref.ref(self), call))
        if len(output_hook.returners) > 1:
            return

        # The graph holds the pass that it was made in. Not the root: an error of a backward that the root keeps holds
        # the graph, and no collector sees that circle.
        def reached(grad: torch.Tensor, made_in: ForwardPass | None = root.iteration.record.running) -> None:
            output_hook.reached()

        registered = hooks.before_backward_of(output, reached)
        if output.grad_fn is None:
            root.gradient_flow.unhook_later([registered])

    @property
    def _in_use_by_sharing_unit(self) -> bool:
        """Whether a unit that holds some of these parameters too is in its forward."""
        return any(unit.phase is FORWARD for unit in self._alive_sharing_units())

    def sharing_unit_finished(self, sharing_unit: Unit) -> None:
        """`sharing_unit`, which holds some of these parameters too, has run its forward: reshard, unless they are
        needed still."""
        in_use = self.phase in (FORWARD, SUMMONED) or self.keep_unsharded or self._in_use_by_sharing_unit
        if in_use:
            return
        if self.reshards_after_forward:
            self.reshard_after_forward(self, sharing_unit)
        else:
            self.track_writes()

    def _own_output(self, output: Any) -> Any:
        """Outputs that are views of unsharded parameters become copies: their memory is about to be freed."""
        lent = {
            handle.unsharded.flat.data_ptr()
            for unit in ((self, *self.owning_units) if self.owning_units else (self,))
            for handle in unit.handles
            if handle.state is UNSHARDED and handle.unsharded.buffer is not None
        }
        lent.discard(0)
        if not lent:
            return output

        def own(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if _storage_pointer(tensor) in lent else tensor

        return own(output) if type(output) is torch.Tensor else map_tensors(own, output)

    def _stay_unsharded(self) -> None:
        if self.options.schedule.branch is not None:
            raise UsageError(
                f"unit {self.label} has trainable parameters, but its forward returned no tensor that requires a "
                "gradient (or returned them inside an object that flatfsdp cannot look into). It is of a part that was "
                "given to ensure_unit_participation(), so it cannot stay unsharded as other units would: ranks that do "
                "not run it free it. Return tensors in tuples, lists, dicts or dataclasses, or call it under "
                "torch.no_grad() if it needs no gradient"
            )
        if is_new(("unanchored", self.name, id(self))):
            warn_once_per_job(
                f"unit {self.label} has trainable parameters, but its forward returned no tensor that requires a "
                "gradient (or returned them inside an object that flatfsdp cannot look into). It stays unsharded until "
                "the end of backward. Return tensors in tuples, lists, dicts or dataclasses, or call it under "
                "torch.no_grad() if it needs no gradient"
            )
        self.keep_unsharded = True
        self.unshard_at_first_gradient()

    def unshard_at_first_gradient(self) -> None:
        """Begin this unit's backward when the first of its gradients is about to come, if nothing else did."""
        self._watch_leaves()
        me = weakref.ref(self)

        def reached() -> None:
            unit = me()
            if unit is not None and unit.phase is IDLE:
                unit.before_backward()

        for handle in self.handles:
            for leaf in handle.leaves:
                if leaf.requires_grad and id(leaf) not in self._first_gradient_hooks:
                    self._first_gradient_hooks.add(id(leaf))
                    hooks.before_leaf(leaf, reached)

    # -- backward ----------------------------------------------------------------------------------------------------

    def before_backward(self, call: ForwardCall | None = None) -> None:
        """A gradient is about to flow into this unit: unshard it and await its gradients. Collective over the shard
        axis."""
        root = self.root
        if self.phase is SUMMONED:
            raise UsageError(
                f"unit {self.label}: backward inside summon_full_params() would reduce gradients of parameters that "
                "are written back later; leave the context first"
            )
        backward = root.begin_backward()
        if self.completed and (self.backward_finished or self._is_done_reading(backward)):
            return
        if self.phase is STEPPED:
            self.enter_phase(PRE_BACKWARD)  # which the table refuses, before anything is gathered
        if call is not None and call.finished_in_task is not None and call.finished_in_task == _torch.graph_task():
            call = None
            if self.expects_gradients and not (self.is_unsharded or backward.has_yet_to_gather(self)):
                return  # freed when that was over
        elsewhere = self.completed and self._expecting_in_task != _torch.graph_task()
        if call is not None and call not in self._open_calls:
            self._open_calls.add(call)
            self.keep_unsharded = self.keep_unsharded or call.outlasts
            elsewhere = elsewhere or backward.in_inner_task()
        elif call is not None or self.phase is PRE_BACKWARD:
            elsewhere = False
        if elsewhere:
            for unit in (self, *self.owning_units):
                unit._late_gradients = unit._count_late_gradients()
        if self.phase is PRE_BACKWARD and (self.is_unsharded or not self.options.schedule.unshard_in_backward):
            return
        for views in self.views:
            check_exposed(views, self.name)
        if call is None and self._may_be_read_after_its_gradients(backward):
            self.keep_unsharded = True
        backward.reached(self)
        if not self.completed:
            self.expect_gradients(backward, share=backward.is_over_with_gradients(self))
        self.enter_phase(PRE_BACKWARD)
        self.record_event("backward")

    def _count_late_gradients(self) -> int:
        """How many gradients the running graph task brings that came before, or are awaited no more."""
        return sum(
            hooks.will_accumulate(handle.leaves[i])
            for handle, _, grads in self.kinds
            for i in (grads.expected if self.completed else grads.arrived)
        )

    def _is_done_reading(self, backward: Backward) -> bool:
        """Whether the running backward has read all parameters that modules of this unit hold, by what is known of
        their gradients: each has come, or is none that this backward computes.

        An output may be reached later than that: the hidden states beside what a head makes of them, or what the unit
        was given. Other ranks may not reach it, so nothing is gathered for it.
        """
        return not backward.in_inner_task() and all(unit._has_its_gradients() for unit in (self, *self.owning_units))

    def _has_its_gradients(self) -> bool:
        # What came in a reentrant checkpoint's own graph task may come again in this one, of another call.
        elsewhere = self._expecting_in_task != _torch.graph_task()
        return self._late_gradients <= 0 and not any(
            views.extended
            or not leaf.requires_grad
            or ((elsewhere or i not in grads.arrived) and hooks.will_accumulate(leaf))
            for handle, views, grads in self.kinds
            for i, leaf in enumerate(handle.leaves)
        )

    def _may_be_read_after_its_gradients(self, backward: Backward) -> bool:
        """Whether something inside its module may read parameters of this unit when all of its own gradients have come:
        gradients pass through frozen ones to others (those that it shares, too), and a segment with others reads what
        it is recomputed with."""
        if self._encloses is None:
            self._encloses = not set(self.module.modules()).issubset(self.modules)
        if not (self._encloses or self.owning_units):
            return False
        return (self._encloses and backward.recomputes) or self._has_frozen()

    def _has_frozen(self) -> bool:
        with _torch.as_plain_tensors():  # leaves may be described as shards
            for handle in self.handles:
                if not all(map(_REQUIRES_GRAD, handle.leaves)):
                    return True
        return False

    def expect_gradients(self, backward: Backward, *, share: bool = False) -> None:
        """Await the gradients of all leaves that require one. `share`: in the parameters' own places."""
        hooked = self.options.comm_hook is not None
        for kind, (handle, _, grads) in enumerate(self.kinds):
            grads.expect_gradients(
                handle.trainable_indices(),
                world=left_to_average(self.groups) if hooked else self.groups.world,
                divide_by=self.options.schedule.divide_by,
                weight=self.root.weight if self.options.schedule.divide_by is None else min(self.root.weight, 1.0),
                sync=backward.reduces(self),
                share=share,
                hooked=hooked,
            )
            users = hooks.are_more_than_ours(self._watched[kind].values())
            if not handle.use_orig_params:
                check_hooks(handle, on_leaves=users)
            elif users:
                hooks.defer_user_hooks(handle.leaves)
            grads.let_collect(backward.collecting)
        self._expecting_in_task = _torch.graph_task()
        self._arrived_in_inner_tasks.clear()
        self._expect(backward)

    def _expect(self, backward: Backward) -> None:
        for grads in self.grads:
            if grads.participates:
                backward.expect(self)
                return

    @property
    def expects_gradients(self) -> bool:
        """Whether gradients are awaited (or all have come) in the running backward."""
        return self.phase is PRE_BACKWARD or self.completed

    def leaf_ready(self, kind: int, index: int) -> None:
        """Autograd accumulated the gradient of a leaf: move it to its slot; all in: reduce and reshard."""
        grads = self.grads[kind]
        if grads.collects_in == _torch.graph_task() and grads.collect(index):
            if not (grads.missing or self._open_calls):
                self._advance(self.root.iteration.backward)
            return
        root = self.root
        backward = root.iteration.backward
        if backward is None or not (self.phase is PRE_BACKWARD or self.completed):
            backward = root.begin_backward()
            self.expect_gradients(backward)
            self.enter_phase(PRE_BACKWARD)
        leaf = self.handles[kind].leaves[index]
        grad = leaf.grad
        leaf.grad = None
        if grad is None:
            return
        again = index in grads.arrived
        task = _torch.graph_task()
        if again or task != backward.task:
            self.single_use = False
        if again or self.completed:
            self._late_gradients -= 1
        if task == self._expecting_in_task:
            if self._arrived_in_inner_tasks:
                self._arrived_in_inner_tasks.discard((kind, index))
        elif not (again or self.completed):
            self._arrived_in_inner_tasks.add((kind, index))
        if not backward.gradient_has_arrived:
            backward.gradient_arrived(watched=bool(root.observers.gradient_came))
        for observe in root.observers.gradient_came:
            observe(self, kind, index, grad)
        grads.arrive(index, grad.detach() if grad.requires_grad else grad)
        del grad  # moved, or collected: what follows may take memory
        if self.completed:
            if self.phase is STEPPED:
                self.enter_phase(PRE_BACKWARD)
            self._expect(backward)  # a late one: a second reduction, at the end of the backward
        else:
            grads.let_collect(backward.collecting)
        if (self.completed or not grads.missing) and not self._open_calls:
            self._advance(backward)

    def _awaits_more(self) -> bool:
        """Whether gradients that came in tasks inside have another part to come, or may have: a segment that is
        recomputed there may share parameters with the rest of this unit's forward."""
        if _torch.graph_task() != self._expecting_in_task:
            return True
        for kind, index in self._arrived_in_inner_tasks:
            if hooks.will_accumulate(self.handles[kind].leaves[index]):
                self.grads[kind].missing.add(index)
        self._arrived_in_inner_tasks.clear()
        return any(grads.missing for grads in self.grads)

    def inputs_ready(self, call: ForwardCall) -> None:
        """The gradients of the inputs of one call are there."""
        self._open_calls.discard(call)
        call.finished_in_task = _torch.graph_task()
        backward = self.root.iteration.backward
        if backward is not None and call.began is not None and call.began == backward.began.get(self):
            self.backward_finished = True
        if self.expects_gradients:
            # Reduce now if all has come that this backward computes, and reshard if nothing reads the parameters.
            self._skip_missing()
            self._advance(backward)

    def may_still_run(self) -> bool:
        """Whether the running graph task will go on with this unit's backward, or begin it."""
        return bool(self._open_calls) or self.awaits_gradients()

    def awaits_gradients(self) -> bool:
        """Whether the running graph task will bring gradients that this unit lacks."""
        if not self.expects_gradients:
            return any(map(hooks.will_accumulate, self.trainable_leaves()))
        return any(hooks.will_accumulate(handle.leaves[i]) for handle, _, grads in self.kinds for i in grads.missing)

    def _skip_missing(self) -> None:
        """Where calls are over and gradients are missing: await none that this backward does not compute.

        Other ranks may use all parameters: they reduce now, and gather on only when this rank has reduced, too.
        """
        awaiting = [(handle, grads) for handle, _, grads in self.kinds if grads.missing]
        if not awaiting or self._open_calls or self.completed:
            return
        backward = self.root.iteration.backward
        if backward is None or backward.in_inner_task() or not backward.brings_gradients():
            return
        for handle, grads in awaiting:
            grads.missing.difference_update([i for i in grads.missing if not hooks.will_accumulate(handle.leaves[i])])

    def _advance(self, backward: Backward | None) -> None:
        """Reduce when every gradient is there, and reshard, unless something in this backward can still read the
        parameters."""
        if self._open_calls or backward is None:
            return
        expecting = missing = False
        for grads in self.grads:
            expecting = expecting or bool(grads.expected)
            missing = missing or bool(grads.missing)
        if expecting and not self.completed and not missing and self._late_gradients <= 0:
            if self._arrived_in_inner_tasks and self._awaits_more():
                return
            self.completed = True
            if self.single_use is None:
                self.single_use = True
            self.enter_phase(POST_BACKWARD)
            self.record_event("grads")
            # The parameters make way before the reduction takes memory.
            self._release(backward)
            backward.gradients_ready(self)
        elif self._late_gradients <= 0 and (
            self.completed or not expecting or not (backward.in_inner_task() or backward.brings_gradients())
        ):
            self._release(backward)
        for owning_unit in self.owning_units:
            if owning_unit.expects_gradients:
                owning_unit._advance(backward)

    def _release(self, backward: Backward) -> None:
        """Reshard after the unit's part of the backward, unless the parameters are needed still."""
        lent = bool(self._sharing_units) and any(unit._open_calls for unit in self._alive_sharing_units())
        needed = lent or self.keep_unsharded or backward.keeps_unsharded(self)
        if not needed and not backward.reaches_again(self):
            self.reshard(SHOWS_GUARDED)
            backward.released(self)

    @property
    def can_finish_later(self) -> bool:
        """Whether what this unit reduces may be waited for after the backward: only readers of `.grad` need it."""
        if self.options.comm_hook is not None or hooks.user_hooked(self.parameters):
            return False
        return all(grads.can_finish_later for grads in self.grads if grads.reducing)

    # -- the end of an iteration -------------------------------------------------------------------------------------

    def reset_to_idle(self, *, keep_unsharded: bool = False) -> None:
        if self.phase is SUMMONED:  # the parameters are the user's; units around it may have run
            return
        super().reset_to_idle(keep_unsharded=keep_unsharded)
        self.keep_unsharded = False
        self._end_backward()

    def run_user_hooks(self, complete: Collection[FlatParamHandle]) -> None:
        """Run users' post-accumulate hooks on the sharded gradients of the handles that are `complete`."""
        for kind, handle in enumerate(self.handles):
            if handle not in complete:
                continue
            if not handle.use_orig_params:
                hooks.run_hooks(handle.flat_param)
            elif hooks.are_more_than_ours(self._watched[kind].values()):
                hooks.run_user_hooks(handle.leaves)

    def retain_for_double_backward(self) -> None:
        super().retain_for_double_backward()
        self._end_backward()

    def _end_backward(self) -> None:
        self.completed = self.backward_finished = False
        self._late_gradients = 0
        self._arrived_in_inner_tasks.clear()
        self._open_calls.clear()


def is_in_call(unit: Unit, began: int | None) -> bool:
    """Whether the backward of the call of `unit` that `began` then has begun, and is not over."""
    return any(call.began == began for call in unit._open_calls)


def _storage_pointer(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have no storage of their own
        return -1
