"""One unit: a list of parameters with the module whose forward needs them, and what happens around that forward and its
backward.

[Note: unit] A unit's parameters live in one handle per kind, whose collectives are issued together. The unit decides
*when* (it is told by its module's forward and by autograd); the root decides *in which order* among units.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from . import _torch, hooks
from .api import BackwardPrefetch, CPUOffload, MixedPrecision
from .buffers import cast_buffers
from .comm import GroupPlan, Transport
from .errors import UsageError, fail, warn_once
from .flat_param import FlatParamHandle
from .grads import Gradients, Reduction
from .lifecycle import PHASE_STEPS, Phase, ShardState, step
from .policy.schedule import AS_BUILT, Schedule
from .policy.strategy import Traits
from .trees import cast_floating, map_tensors, move, tensors_in
from .values import Beginnings
from .views import Exposure, Home, Shown, check_exposed, check_homes, check_unwritten, refuse_gradient

if TYPE_CHECKING:
    from .extensions import Extended
    from .root import Root


class Call:
    """One forward of a unit: a name for what its backward still has to do.

    The anchors of its outputs hold it, and with it `kept`, what watches its inputs; the inputs' hooks hold it weakly
    ([Note: arrivals]).
    """

    __slots__ = ("__weakref__", "kept")

    def __init__(self) -> None:
        self.kept: object = None


class Unit:
    """One wrapped module with the parameters that no nested unit owns.

    Attributes:
        name: path from the root's module; "" for the root.
        handles: one per kind of parameter, none if the unit owns no parameter.
        homes: where modules of this unit hold the handles' leaves.
        modules: the modules of this unit, whose buffers it computes with.
        owners: units that own parameters which modules of this unit hold too (tied); unsharded whenever this one is.
        aliases: where modules of this unit hold those.
        schedule: what users set. [Note: schedule]
        phase: [Note: lifecycle].
    """

    def __init__(
        self,
        module: nn.Module,
        handles: Sequence[FlatParamHandle],
        homes: Sequence[Home],
        *,
        traits: Traits,
        groups: GroupPlan,
        mixed_precision: MixedPrecision,
        cpu_offload: CPUOffload,
        backward_prefetch: BackwardPrefetch | None,
        forward_prefetch: bool,
        modules: Sequence[nn.Module] = (),
        owners: Sequence[Unit] = (),
        aliases: Sequence[Home] = (),
        island: bool = False,
        schedule: Schedule = AS_BUILT,
    ) -> None:
        self.name = ""
        self.module = module
        self.handles = list(handles)
        self.homes = list(homes)
        self.traits = traits
        self.groups = groups
        self.mixed_precision = mixed_precision
        self.cpu_offload = cpu_offload
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self.schedule = schedule
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self._versions_asked: list[tuple[int, ...]] = []  # of the handles, when a user asked for them unsharded
        self._forward_targets: list[weakref.ref[Unit]] = []
        self._backward_targets: list[weakref.ref[Unit]] = []
        self.modules = list(modules)
        self.owners: list[Unit] = []
        self._borrowers: list[weakref.ref[Unit]] = []
        self.tied_modules: list[nn.Module] = []  # those of the owners, in a copy: all are there once its root is
        self.borrow_from(owners)
        self.aliases = list(aliases)
        # A full-precision module (batch norm) in a low-precision model: inputs are widened, outputs narrowed again.
        self.island = island
        self._outer_dtype: torch.dtype | None = None
        self.phase = Phase.IDLE
        self.shown = [Shown(handle) for handle in self.handles]
        self.grads = [Gradients(handle, shown) for handle, shown in zip(self.handles, self.shown, strict=True)]
        self._root: weakref.ref[Root] | None = None
        self.own_root: Root | None = None  # until the wrapper takes it: a root owns its units, and no cycle may remain
        self._watched: list[set[int]] = [set() for _ in self.handles]  # leaves that tell when their gradient is there
        self._foretelling: set[int] = set()  # ids of leaves that tell before
        # Calls whose backward has begun and has not reached their inputs: something in it may still read the
        # parameters.
        self._open_calls: set[Call] = set()
        self.completed = False  # every gradient that the running backward awaits has arrived
        # Whether each gradient came once and in the backward's own graph task, as far as seen. [Note: slot sharing]
        self.reads_once: bool | None = None
        self.kept = False  # stays unsharded between iterations, because a user said so
        self.needed_whole = False  # nothing tells when its backward is over: unsharded until the end of the backward
        self.beginnings: Beginnings | None = None  # until they have been compared with the other ranks'
        self.gather: Transport
        self.scatter: Transport
        self.replicate: Transport | None

    def extend(self, extended: Sequence[Extended]) -> None:
        """Let modules see what extensions make of some leaves."""
        for handle, shown in zip(self.handles, self.shown, strict=True):
            leaves = set(map(id, handle.leaves))
            shown.extended = [each for each in extended if id(each.leaf) in leaves]

    def borrow_from(self, owners: Sequence[Unit]) -> None:
        """Hold parameters of `owners` too."""
        self.owners = list(owners)
        for owner in self.owners:
            owner._borrowers.append(weakref.ref(self))

    # -- identity ----------------------------------------------------------------------------------------------------

    @property
    def root(self) -> Root:
        """What exists once for the tree of units that this one belongs to."""
        root = self._root() if self._root is not None else None
        if root is None:
            raise UsageError(f"unit {self.label}: the model that it was part of has been deleted")
        return root

    def join(self, root: Root) -> None:
        """Belong to `root` from now on."""
        self._root = weakref.ref(root)
        self._trace = root.trace
        for handle in self.handles:
            handle.move_to_ledger(root.ledger)

    @property
    def label(self) -> str:
        """The unit's name for messages."""
        return repr(self.name) if self.name else "<root>"

    def enter_phase(self, phase: Phase) -> None:
        """Change the phase, by the table."""
        self.phase = step(self.phase, phase, PHASE_STEPS, self.name or "<root>", self._trace)

    def note(self, kind: str) -> None:
        """Record an event of this unit."""
        self._trace.record(kind, self.name, self.phase._value_)

    # -- settings ----------------------------------------------------------------------------------------------------

    def set_schedule(self, **settings: Any) -> None:
        """Change what users set. [Note: schedule]"""
        self.schedule = replace(self.schedule, **settings)
        self.root.schedule_changed()

    def hook_all_reduce(self, hook: Callable[[torch.Tensor], None] | None) -> None:
        """Run `hook` on the sums of gradients; None to end that."""
        self.all_reduce_hook = hook
        self.root.schedule_changed()

    def prefetch_in_forward(self, targets: Iterable[Unit]) -> None:
        """Gather `targets` ahead in forward; none for the unit that followed in the forward before."""
        self._forward_targets = [weakref.ref(unit) for unit in targets]
        self.root.schedule_changed()

    def prefetch_in_backward(self, targets: Iterable[Unit]) -> None:
        """Gather `targets` ahead in backward; none for the unit that comes next."""
        self._backward_targets = [weakref.ref(unit) for unit in targets]
        self.root.schedule_changed()

    @property
    def forward_targets(self) -> list[Unit]:
        """The units that users let this one gather ahead in forward."""
        return [unit for ref in self._forward_targets if (unit := ref()) is not None]

    @property
    def backward_targets(self) -> list[Unit]:
        """The units that users let this one gather ahead in backward."""
        return [unit for ref in self._backward_targets if (unit := ref()) is not None]

    def told(self) -> Iterator[str]:
        """What users set, in words."""
        yield from self.schedule.told()
        if self.all_reduce_hook is not None:
            yield "an all-reduce hook"
        for pass_, targets in (("forward", self.forward_targets), ("backward", self.backward_targets)):
            if targets:
                yield f"prefetch in {pass_} of {', '.join(unit.label for unit in targets)}"

    @property
    def hidden(self) -> list[Home]:
        """The homes and aliases that give up the registration, a flat parameter having it."""
        flattened = {
            id(leaf)
            for unit in (self, *self.owners)
            for handle in unit.handles
            if not handle.use_orig_params
            for leaf in handle.leaves
        }
        return [home for home in (*self.homes, *self.aliases) if id(home.leaf) in flattened]

    @property
    def largest_gradient(self) -> int:
        """Bytes of the largest gradient that a backward can bring, in the compute dtype."""
        return max(
            (
                spec.numel * handle.precision.compute.itemsize
                for handle in self.handles
                if handle.trainable
                for spec in handle.layout.params
            ),
            default=0,
        )

    # -- data --------------------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether all data is sharded."""
        return all(handle.state is ShardState.SHARDED for handle in self.handles)

    @property
    def is_whole(self) -> bool:
        """Whether all data is unsharded, or on its way."""
        return not any(handle.state is ShardState.SHARDED for handle in self.handles)

    def launch_unshard(self, *, ahead: bool = False) -> None:
        """Issue the all-gathers of whatever is sharded; `ahead`: before its use. Collective over the shard axis."""
        root = self.root
        if self.places_are_taken:
            self._refuse_to_regain()
        if self.is_whole:
            return
        for handle, grads in zip(self.handles, self.grads, strict=True):
            if handle.state is ShardState.SHARDED:
                grads.return_inputs()
                dtype = self._dtype_of(handle)
                root.limiter.make_room(handle.buffer(dtype), ahead=ahead)
                handle.launch_unshard(self.gather, root.lanes.unshard, dtype=dtype)
                if handle.offload:
                    root.limiter.note_upload()
        self.note("gather")

    def wait_unshard(self) -> None:
        """Order the caller after the gathers and let the leaves show the whole."""
        arrived = False
        for handle, shown in zip(self.handles, self.shown, strict=True):
            if handle.state is ShardState.GATHERING:
                shown.unhide()
                handle.wait_unshard()
                arrived = True
        if arrived:
            self.note("gathered")
        for shown in self.shown:
            shown.show(Exposure.WHOLE)
            shown.install_extended()

    def reshard_unused(self) -> None:
        """Free what was gathered ahead and is not used after all."""
        unused = [handle for handle in self.handles if handle.state is ShardState.GATHERING]
        for handle in unused:
            handle.wait_unshard()
            self.root.free(handle)
        if unused:
            self.note("reshard")

    def launch_on_request(self) -> None:
        """Issue the all-gathers because a user asks for the parameters. Collective over the shard axis."""
        self.write_back()
        self._versions_asked = [handle.versions for handle in self.handles]
        self.kept = self.is_between() and self.groups.shard.size > 1
        self.launch_unshard(ahead=True)

    def show_shapes(self) -> None:
        """A backward that does not read the parameters begins."""
        for shown in self.shown:
            shown.show(Exposure.SHAPE)

    def reshard(self, exposure: Exposure) -> None:
        """Free the unsharded parameters; the leaves show `exposure` (the whole again where the shard is the whole)."""
        freed = False
        root = self.root
        for handle, shown, grads in zip(self.handles, self.shown, self.grads, strict=True):
            if handle.state is ShardState.GATHERING:
                handle.wait_unshard()
            if handle.state is ShardState.UNSHARDED:
                if handle.owns_unsharded or exposure is Exposure.SHARD:
                    if grads.take_place(functools.partial(root.limiter.give_back, handle.name)):
                        handle.reshard()
                    else:
                        root.free(handle)
                    shown.show(exposure)
                    freed = True
            else:
                shown.show(exposure)
        if freed:
            self.note("reshard")

    @property
    def places_are_taken(self) -> bool:
        """Whether gradients lie in places of parameters while the unit is unsharded. [Note: slot sharing]"""
        return any(grads.occupies_place for grads in self.grads)

    def _refuse_to_regain(self) -> NoReturn:
        fail(
            UsageError(
                f"unit {self.label}: its forward runs again inside a backward, after gradients have taken the places "
                "of its parameters; no backward before did that. Catch this on all ranks and run the step again: in "
                "units of this class gradients have memory of their own from now on"
            )
        )

    # -- forward -----------------------------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward with the parameters unsharded around it. Collective over the shard axis."""
        root = self.root
        outermost = root.enter(self)
        phase = self.phase
        try:
            call, args, kwargs = self._before_forward(root, outermost, args, kwargs)
            dtype = None if root.in_full_precision(self) else self.mixed_precision.buffer_dtype
            with cast_buffers(self.modules, dtype):
                output = self.module(*args, **kwargs)
            output = self._after_forward(root, call, output)
        except BaseException:
            self.phase = phase
            root.leave(self, failed=True)
            raise
        if _torch.in_backward():
            self.phase = phase  # a recomputation returns to where its backward is
        else:
            self.enter_phase(Phase.IDLE)
        root.leave(self)
        return output

    def _before_forward(
        self, root: Root, outermost: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call | None, tuple[Any, ...], dict[str, Any]]:
        if _torch.in_backward() and any(grads.arrived for grads in self.grads):
            self.reads_once = False  # parameters are read after their gradients have come
        self.enter_phase(Phase.FORWARD)
        if outermost:
            self._forget_autocast(root)
        self._follow_requires_grad()
        root.gather_for_forward(self)
        self.note("forward")
        if outermost:
            args, kwargs = move((args, kwargs), root.device.device)
        if self.island:
            floating = [t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()]
            self._outer_dtype = floating[0] if floating else None
            args, kwargs = cast_floating((args, kwargs), self.handles[0].shard.dtype if self.handles else torch.float32)
        dtype = self._input_dtype(root)
        if dtype is not None:
            args, kwargs = cast_floating((args, kwargs), dtype)
        if not torch.is_grad_enabled():
            return None, args, kwargs
        self._watch_leaves()
        return self._watch_inputs(root, (args, kwargs)), args, kwargs

    def _forget_autocast(self, root: Root) -> None:
        """Drop autocast's copies of weights, which it keeps for leaves until its context ends.

        At the start of a forward they may be older than the optimizer's last step; without a graph that needs them,
        they would hold the whole model unsharded.
        """
        if torch.is_autocast_enabled(root.device.device.type):
            torch.clear_autocast_cache()

    def _input_dtype(self, root: Root) -> torch.dtype | None:
        wanted = (
            self.mixed_precision.cast_root_forward_inputs
            if self is root.unit
            else self.mixed_precision.cast_forward_inputs
        )
        return self.mixed_precision.param_dtype if wanted and not root.in_full_precision(self) else None

    def _follow_requires_grad(self) -> None:
        """With the flat parameter registered, its `requires_grad` is the one that users set."""
        for handle in self.handles:
            if not handle.use_orig_params:
                wanted = handle.flat_param.requires_grad
                for leaf in handle.leaves:
                    if leaf.requires_grad != wanted:
                        leaf.requires_grad_(wanted)

    def _watch_leaves(self) -> None:
        for kind, handle in enumerate(self.handles):
            watched = self._watched[kind]
            if len(watched) == len(handle.leaves):
                continue
            for index, leaf in enumerate(handle.leaves):
                if leaf.requires_grad and index not in watched:
                    watched.add(index)
                    hooks.watch_leaf(leaf, self, kind, index)

    def _watch_inputs(self, root: Root, inputs: Any) -> Call | None:
        """Let the inputs' gradients tell when this call's backward is over.

        The parameters' own gradients do not: frozen ones have none, and a detached use, or a segment recomputed inside
        the module, reads a parameter after its gradient has arrived. The gradient of an input that an earlier call of
        another unit read too is there only after that one's backward; it is awaited only where nothing else tells.
        """
        inputs = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        awaited = [tensor for tensor in inputs if root.links.first_reader(tensor, self)]
        if not awaited and not all(leaf.requires_grad for handle in self.handles for leaf in handle.leaves):
            awaited = inputs
        if not awaited:
            return None
        call = Call()
        me, this = weakref.ref(self), weakref.ref(call)
        if len(awaited) == 1 and root.links.follow_anchor(awaited[0], me, call):
            return call

        def arrived() -> None:
            unit, known = me(), this()
            if unit is not None and known is not None:
                unit.inputs_ready(known)

        registered, call.kept = hooks.after_backward_to(awaited, arrived)
        if all(tensor.grad_fn is None for tensor in awaited):
            root.links.unhook_later(registered)
        return call

    def _after_forward(self, root: Root, call: Call | None, output: Any) -> Any:
        recomputing = _torch.in_backward()
        for unit in (self, *self.owners):
            for handle in unit.handles:
                check_unwritten(handle, unit.name)
        output = self._own_output(output)
        if self.island and self._outer_dtype is not None:
            output = cast_floating(output, self._outer_dtype)
        if not torch.is_grad_enabled():
            self._forget_autocast(root)
        keep = recomputing or self._lent or not self.reshards_after_forward
        if torch.is_grad_enabled():
            anchors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if anchors:
                if not recomputing:
                    root.record.anchor(self)
                for anchor in anchors:
                    self._anchor(root, anchor, call)
            elif not recomputing and any(leaf.requires_grad for handle in self.handles for leaf in handle.leaves):
                self._stay_whole()
                keep = True
        if not keep:
            self.reshard(Exposure.NOTHING)
        if not recomputing:
            for owner in self.owners:
                owner.lent_no_more()
        return output

    @property
    def reshards_after_forward(self) -> bool:
        """Whether the unsharded parameters are freed between forward and backward.

        The root's backward begins where its forward ends: unless a user says so, freeing them would gain nothing.
        """
        chosen = self.schedule.reshard_after_forward
        return chosen if chosen is not None else self.traits.reshard_after_forward and self is not self.root.unit

    def reshards_after_backward(self, *, reduced: bool) -> bool:
        """Whether the unsharded parameters are freed after a backward that `reduced` gradients or did not."""
        chosen = self.schedule.reshard_after_backward
        return chosen if chosen is not None else reduced or self.traits.reshard_without_sync

    def _anchor(self, root: Root, output: torch.Tensor, call: Call | None) -> None:
        """Begin this unit's backward when the gradient of `output` is there; the backward of its readers is over then.

        Those are told first: they reshard before anything is gathered for this unit.
        """
        readers = root.links.new_anchor(output)
        me = weakref.ref(self)

        def reached() -> None:
            for reader, their_call in readers:
                if (unit := reader()) is not None:
                    unit.inputs_ready(their_call)
            if (unit := me()) is not None:
                unit.before_backward(call)

        registered = hooks.before_backward_of(output, reached)
        if output.grad_fn is None:
            root.links.unhook_later([registered])

    @property
    def is_tied(self) -> bool:
        """Whether modules of several units hold some of these parameters, or see them transformed."""
        return bool(self.owners or self._borrowers) or any(shown.extended for shown in self.shown)

    @property
    def _lent(self) -> bool:
        """Whether a unit that holds some of these parameters too is in its forward."""
        return any(unit.phase is Phase.FORWARD for unit in self._alive_borrowers())

    def _alive_borrowers(self) -> Iterator[Unit]:
        for ref in self._borrowers:
            if (unit := ref()) is not None:
                yield unit

    def lent_no_more(self) -> None:
        """A unit that holds some of these parameters too has run its forward: reshard, unless they are needed still."""
        in_use = self.phase is Phase.FORWARD or self.needed_whole or self._lent
        if not in_use and self.reshards_after_forward:
            self.reshard(Exposure.NOTHING)

    def _own_output(self, output: Any) -> Any:
        """Outputs that are views of unsharded parameters become copies: their memory is about to be freed."""
        lent = {
            handle.unsharded.untyped_storage().data_ptr()
            for unit in (self, *self.owners)
            for handle in unit.handles
            if handle.state is ShardState.UNSHARDED and handle.owns_unsharded
        }
        lent.discard(0)
        if not lent:
            return output

        def own(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if _storage_pointer(tensor) in lent else tensor

        return map_tensors(own, output)

    def _stay_whole(self) -> None:
        warn_once(
            ("unanchored", self.name, id(self)),
            f"unit {self.label} has trainable parameters, but its forward returned no tensor that requires a gradient "
            "(or returned them inside an "
            "object that flatfsdp cannot look into). It stays unsharded until the end of backward. Return tensors in "
            "tuples, lists, "
            "dicts or dataclasses, or call it under torch.no_grad() if it needs no gradient",
        )
        self.needed_whole = True
        me = weakref.ref(self)

        def reached() -> None:
            unit = me()
            if unit is not None and unit.phase is Phase.IDLE:
                unit.before_backward()

        for handle in self.handles:
            for leaf in handle.leaves:
                if leaf.requires_grad and id(leaf) not in self._foretelling:
                    self._foretelling.add(id(leaf))
                    hooks.before_leaf(leaf, reached)

    # -- backward ----------------------------------------------------------------------------------------------------

    def before_backward(self, call: Call | None = None) -> None:
        """A gradient is about to flow into this unit: unshard it and await its gradients. Collective over the shard
        axis."""
        root = self.root
        if self.phase is Phase.SUMMONED:
            raise UsageError(
                f"unit {self.label}: backward inside summon_full_params() would reduce gradients of parameters that "
                "are written back later; leave the context first"
            )
        root.begin_backward()
        if call is not None:
            self._open_calls.add(call)
        if self.phase is Phase.PRE_BACKWARD and (self.is_whole or not self.schedule.unshard_in_backward):
            return
        for handle in self.handles:
            check_exposed(handle, self.name)
        root.gather_for_backward(self)
        if not self.completed:
            self.arm(share=root.shares_slots(self))
        self.enter_phase(Phase.PRE_BACKWARD)
        self.note("backward")

    def arm(self, *, share: bool = False) -> None:
        """Await the gradients of all leaves that require one. `share`: in the parameters' own places."""
        root = self.root
        for handle, grads in zip(self.handles, self.grads, strict=True):
            expected = frozenset(i for i, leaf in enumerate(handle.leaves) if leaf.requires_grad)
            grads.arm(
                expected,
                world=self.groups.world,
                divide_by=self.schedule.divide_by,
                sync=root.reduces(self),
                share=share,
            )
            for i in expected:
                hooks.defer_user_hooks(handle.leaves[i])
        root.expect_gradients(self)

    @property
    def armed(self) -> bool:
        """Whether gradients are awaited (or all have come) in the running backward."""
        return self.phase is Phase.PRE_BACKWARD or self.completed

    def leaf_ready(self, kind: int, index: int) -> None:
        """Autograd accumulated the gradient of a leaf: move it to its slot; all in: reduce and reshard."""
        root = self.root
        if not self.armed or root.backward is None:
            root.begin_backward()
            self.arm()
            self.enter_phase(Phase.PRE_BACKWARD)
        handle = self.handles[kind]
        leaf = handle.leaves[index]
        grad = leaf.grad
        leaf.grad = None
        if grad is None:
            return
        if grad.shape != handle.layout.params[index].shape:
            refuse_gradient(handle, index, grad)
        grads = self.grads[kind]
        if self.reads_once is not False and (root.in_inner_task() or index in grads.arrived):
            self.reads_once = False
        root.gradient_arrived()
        grads.arrive(index, grad.detach())
        del grad  # moved, or collected: what follows may take memory
        if self.completed:
            root.expect_gradients(self)  # a late one: a second reduction, at the end of the backward
        if self.completed or grads.complete:
            self._advance()

    def inputs_ready(self, call: Call) -> None:
        """The gradients of the inputs of one call are there."""
        self._open_calls.discard(call)
        self._advance()

    def _advance(self) -> None:
        """Reduce when every gradient is there, and reshard, unless something in this backward can still read the
        parameters."""
        root = self.root
        if self._open_calls or root.backward is None:
            return
        expecting = any(grads.expected for grads in self.grads)
        if expecting and not self.completed and all(grads.complete for grads in self.grads):
            self.completed = True
            if self.reads_once is None:
                self.reads_once = True
            self.enter_phase(Phase.POST_BACKWARD)
            self.note("grads")
            # The parameters make way before the reduction takes memory.
            self._release(root)
            root.gradients_ready(self)
        elif self.completed or not expecting:
            self._release(root)
        for owner in self.owners:
            if owner.armed:
                owner._advance()

    def _release(self, root: Root) -> None:
        """Reshard after the unit's part of the backward, unless the parameters are needed still."""
        lent = any(unit._open_calls for unit in self._alive_borrowers())
        if not lent and not self.needed_whole and not root.keeps_whole(self):
            self.reshard(Exposure.NOTHING)
            root.released(self)

    def reduce(self) -> list[Reduction]:
        """Issue the reductions of all kinds that take part. Collective over the shard axis."""
        lane = self.root.lanes.reduce
        if self.places_are_taken:
            self.reshard(Exposure.NOTHING)
        self.note("reduce")
        completes = self.schedule.all_reduce or self.replicate is None
        return [
            grads.launch(self.scatter, self.replicate, lane, completes=completes, hook=self.all_reduce_hook)
            for grads in self.grads
            if grads.awaited
        ]

    # -- the end of an iteration -------------------------------------------------------------------------------------

    def rest(self, *, keep_whole: bool = False) -> None:
        """Return to between iterations: leaves show the shard; unsharded memory is freed unless it is to be kept."""
        by_choice = self.schedule.keeps_by_choice and self.groups.shard.size > 1
        self.kept = keep_whole and by_choice and self.is_whole
        if keep_whole:
            for handle, shown in zip(self.handles, self.shown, strict=True):
                if handle.state is ShardState.GATHERING:
                    handle.wait_unshard()
                shown.show(Exposure.SHARD)
        else:
            self.reshard(Exposure.SHARD)
        self.phase = Phase.IDLE
        self.needed_whole = False
        self.completed = False
        self._open_calls.clear()

    def pause(self) -> None:
        """A backward that will be differentiated again has ended: parameters stay whole, gradients stay in flight."""
        self.phase = Phase.IDLE
        self.completed = False
        self._open_calls.clear()
        for grads in self.grads:
            grads.pause()

    def settle(self) -> None:
        """Make the reduced gradients `.grad`."""
        for grads in self.grads:
            grads.settle()

    def run_user_hooks(self) -> None:
        """Run users' post-accumulate hooks on the sharded gradients."""
        for handle in self.handles:
            if handle.use_orig_params:
                for leaf in handle.leaves:
                    if leaf.grad is not None:
                        hooks.run_user_hooks(leaf)
            elif handle.flat_param.grad is not None:
                hooks.run_user_hooks(handle.flat_param)

    def undo(self) -> bool:
        """After a failed backward, at once: leaves show the shard, `.grad` is what it was. True if a window was lost.

        Runs where an exception is being raised: no waiting, no communication.
        """
        if self.phase is not Phase.SUMMONED:  # else the parameters are the user's, and the backward did not reach them
            for shown in self.shown:
                shown.show(Exposure.SHARD)
            for grads in self.grads:
                grads.restore()
        return any(grads.window_open for grads in self.grads)

    def is_between(self) -> bool:
        """Whether the leaves show the shard, as between iterations."""
        return all(shown.exposure is Exposure.SHARD for shown in self.shown)

    def write_back(self) -> None:
        """Take over what the user put in the leaves' place; free a kept buffer that is out of date.

        Raises UsageError for changes that cannot be taken over.
        """
        changed = [home for home in (*self.homes, *self.aliases) if home.held is not home.leaf]
        if changed and self.is_between():
            check_homes(changed, self.aliases, self.root.names_of_leaves(), self.label)
        for kind, (handle, shown) in enumerate(zip(self.handles, self.shown, strict=True)):
            if shown.exposure is Exposure.SHARD:
                wrote = shown.write_back(changed)
                if handle.state is ShardState.UNSHARDED and (wrote or self._is_out_of_date(handle)):
                    self.root.free(handle)
                elif handle.state is ShardState.GATHERING and handle.versions != self._versions_asked[kind]:
                    handle.wait_unshard()
                    self.root.free(handle)
            else:
                check_exposed(handle, self.name)

    def _dtype_of(self, handle: FlatParamHandle) -> torch.dtype:
        """In which dtype the unit computes with the handle's parameters now."""
        return handle.precision.master if self.root.in_full_precision(self) else handle.precision.compute

    def _is_out_of_date(self, handle: FlatParamHandle) -> bool:
        """Whether what was kept unsharded is not what a gather would bring: the shard was written to since, or the
        dtype is that of evaluation, and this is training."""
        return handle.is_stale or handle.unsharded.dtype != self._dtype_of(handle)


def _storage_pointer(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have no storage of their own
        return -1
