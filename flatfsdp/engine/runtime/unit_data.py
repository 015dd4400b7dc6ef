"""The data of one unit: its flat parameters, what their leaves show, and their gradients.

[Note: unit] A unit's parameters live in one handle per kind, whose collectives are issued together. The unit decides
*when* (it is told by its module's forward and by autograd, `unit.py`); the root decides *in which order* among units.
Here is *how*: gathered, freed, reduced, brought to rest.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from ...api import CPUOffload, MixedPrecision
from ...errors import UsageError, fail
from ..agreement.checksums import InitialChecksums
from ..base import _torch
from ..base import autograd as hooks
from ..comm.axes import ProcessGroups
from ..comm.transport import Reducer, Transport
from ..config.schedule_options import AS_BUILT, Schedule
from ..config.strategy import Traits
from ..config.unit_options import UnitOptions
from ..flat.flat_param import FlatParamHandle
from ..flat.gradients import Gradients
from ..flat.param_refs import ParamRef, check_param_refs, refuse_functional_call
from ..flat.reduction import Reduction, ReductionInput
from ..flat.sources import DEVICE, HOST, HostCache, PostForwardShard, UnshardSource
from ..flat.states import GATHERING, IDLE, PHASE_STEPS, SHARDED, SUMMONED, UNSHARDED, Phase, refuse_step
from ..flat.views import (
    SHOWS_NOTHING,
    SHOWS_SHAPE,
    SHOWS_SHARD,
    SHOWS_UNSHARDED,
    ParamViews,
    ViewMode,
    check_exposed,
    check_requested,
)

if TYPE_CHECKING:
    from ..flat.extensions import TransformedParam
    from .model import Root
    from .unit import Unit


_state_of, _requires_grad = attrgetter("state"), attrgetter("requires_grad")  # faster than a generator each time


class UnitData:
    """The parameters that one wrapped module and no nested unit owns.

    Attributes:
        name: path from the root's module, "" for the root; with it `label`, its name in messages, and `prefix`, that
            of its parameters' names.
        index, first_parameter: places of the unit and of its first parameter among those of the model.
        handles: one per kind of parameter, none if the unit owns no parameter.
        views, grads: for each handle, what its leaves show and its gradients; kinds: all three.
        param_refs: where modules of this unit hold the handles' leaves.
        owning_units: units that own parameters which modules of this unit hold too (tied); unsharded whenever this one
            is.
        shared_refs: where modules of this unit hold those.
        device_mesh: the mesh that `groups` are of, where a user gave one; pickles do not have it.
        options: what users chose.
        phase: [Note: lifecycle].
        persists_between_iterations: stays unsharded between iterations, because a user said so.
        maybe_stale: some ranks may have written to their shards, and others not.
        initial_checksums: of the parameters, until they have been compared with the other ranks'.
        gather, scatter, replicate: the transports for the collectives; replicate is None where there is one copy.
        reducers: the last two, or a communication hook in the place of one of them.
        post_forward_gather: the transport over the post-forward axis; None where there is none. [Note: post-forward
            shards]
    """

    gather: Transport
    scatter: Transport
    replicate: Transport | None
    reducers: tuple[Reducer, Reducer | None]

    def __init__(
        self,
        module: nn.Module,
        handles: Sequence[FlatParamHandle],
        param_refs: Sequence[ParamRef],
        *,
        traits: Traits,
        groups: ProcessGroups,
        device_mesh: Any = None,
        mixed_precision: MixedPrecision,
        cpu_offload: CPUOffload,
        owning_units: Sequence[UnitData] = (),
        shared_refs: Sequence[ParamRef] = (),
        schedule: Schedule = AS_BUILT,
    ) -> None:
        self.identify("", 0, 0)
        self.module = module
        self.handles = list(handles)
        self.param_refs = list(param_refs)
        self.traits = traits
        self.groups = groups
        self.device_mesh = device_mesh
        self.mixed_precision = mixed_precision
        self.cpu_offload = cpu_offload
        self.options = UnitOptions(schedule)
        self.owning_units: list[Any] = []
        self._sharing_units: list[weakref.ref[Any]] = []
        self.tied_modules: list[nn.Module] = []  # those of the owners, in a copy: all are there once its root is
        self.share_params_of(owning_units)
        self.shared_refs = list(shared_refs)
        self.phase = IDLE
        self.views = [ParamViews(handle) for handle in self.handles]
        self.grads = [Gradients(handle, views) for handle, views in zip(self.handles, self.views, strict=True)]
        self.kinds = list(zip(self.handles, self.views, self.grads, strict=True))
        self.post_forward_gather: Transport | None = None
        self._root: weakref.ref[Root] | None = None
        self.own_root: Root | None = None  # until the wrapper takes it: a root owns its units, and no cycle may remain
        self.persists_between_iterations = False
        self.maybe_stale = False
        self._versions_at_request: list[tuple[int, ...]] = []  # of the handles, when a user asked for them unsharded
        self.initial_checksums: InitialChecksums | None = None

    def extend(self, extended: Sequence[TransformedParam]) -> None:
        """Let modules see what extensions make of some leaves."""
        for handle, views, _ in self.kinds:
            leaves = set(map(id, handle.leaves))
            views.extended = [each for each in extended if id(each.leaf) in leaves]

    def share_params_of(self, owning_units: Sequence[UnitData]) -> None:
        """Hold parameters of `owning_units` too."""
        self.owning_units = list(owning_units)
        for owning_unit in self.owning_units:
            owning_unit._sharing_units.append(weakref.ref(self))

    # -- identity ----------------------------------------------------------------------------------------------------

    @property
    def root(self) -> Root:
        """What exists once for the tree of units that this one belongs to."""
        root = self._root() if self._root is not None else None
        if root is None:
            raise UsageError(
                f"unit {self.label}: the model that it was part of has been deleted, and with it what its parts share: "
                "communicators, and the order of their collectives. Hold on to the outermost wrapper for as long as a "
                "part of it is used; what is to be used otherwise is built anew and loads the model's state dict"
            )
        return root

    def attach_to(self, root: Root) -> None:
        """Belong to `root` from now on."""
        self._root = weakref.ref(root)
        self.resources = root.resources
        for handle in self.handles:
            handle.move_to_tracker(root.resources.tracker)

    def identify(self, name: str, index: int, first_parameter: int) -> None:
        """Give the unit its path in the model, and its place there."""
        self.name, self.index, self.first_parameter = name, index, first_parameter
        self.label = repr(name) if name else "<root>"
        self.prefix = f"{name}." if name else ""

    def enter_phase(self, phase: Phase) -> None:
        """Change the phase, by the table."""
        if phase not in PHASE_STEPS[self.phase]:
            refuse_step(self.phase, phase, PHASE_STEPS, self.name or "<root>", self.resources.events)
        self.phase = phase

    def record_event(self, kind: str) -> None:
        """Record an event of this unit."""
        self.resources.events.append((kind, self.name, self.phase._value_))

    # -- choices -----------------------------------------------------------------------------------------------------

    def set_options(self, **changes: Any) -> None:
        """Change what users chose."""
        self.options = replace(self.options, **changes)
        self.root.options_changed()

    def set_schedule(self, **changes: Any) -> None:
        """Change the schedule that users chose. [Note: schedule]"""
        self.set_options(schedule=replace(self.options.schedule, **changes))

    @property
    def unregistered_refs(self) -> list[ParamRef]:
        """The homes and aliases that give up the registration, a flat parameter having it."""
        flattened = {
            id(leaf)
            for unit in (self, *self.owning_units)
            for handle in unit.handles
            if not handle.use_orig_params
            for leaf in handle.leaves
        }
        return [param_ref for param_ref in (*self.param_refs, *self.shared_refs) if id(param_ref.leaf) in flattened]

    def trainable_leaves(self) -> list[nn.Parameter]:
        """The parameters that require a gradient."""
        return [leaf for handle in self.handles for leaf in handle.leaves if leaf.requires_grad]

    def trained(self) -> tuple[tuple[bool, ...], ...]:
        """By handle, which of its leaves require a gradient."""
        flags: tuple[tuple[bool, ...], ...] = ()
        for handle in self.handles:
            flags += (tuple(map(_requires_grad, handle.leaves)),)
        return flags

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that an optimizer sees."""
        return [parameter for handle in self.handles for parameter in handle.steppable]

    @property
    def trainable_numel(self) -> int:
        """Elements of the parameters that require a gradient, whatever they show."""
        return sum(handle.layout.params[i].numel for handle in self.handles for i in handle.trainable_indices())

    @property
    def largest_gradient(self) -> int:
        """Bytes of the largest gradient that a backward can bring, in the compute dtype."""
        return max(
            (
                spec.numel * handle.precision.compute.itemsize
                for handle in self.handles
                if handle.options.trainable
                for spec in handle.layout.params
            ),
            default=0,
        )

    @property
    def is_tied(self) -> bool:
        """Whether modules of several units hold some of these parameters, or see them transformed."""
        return bool(self.owning_units or self._sharing_units) or any([views.extended for views in self.views])

    def _alive_sharing_units(self) -> Iterator[Any]:
        for ref in self._sharing_units:
            if (unit := ref()) is not None:
                yield unit

    # -- data --------------------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether all data is sharded that does not stay on the device."""
        return not [h for h in self.handles if h.state is not SHARDED and h.persistence is not DEVICE]

    @property
    def is_unsharded(self) -> bool:
        """Whether all data is unsharded, or on its way."""
        return SHARDED not in map(_state_of, self.handles)

    def launch_unshard(self, *, ahead: bool = False) -> None:
        """Issue the all-gathers of whatever is sharded; `ahead`: before its use. Collective over the shard axis, or
        in a backward over the post-forward axis."""
        resources = self.resources
        sharded = self.prepare_unshard(ahead=ahead)
        for handle, source in sharded:
            handle.launch_unshard(source, resources.streams.unshard)
            if source.reads_host:
                resources.limiter.record_upload()
        if sharded:
            self.record_gather()

    def record_gather(self) -> None:
        """Gathers of this unit were issued."""
        self.record_event("gather")
        root = self.root
        if root.iteration.backward is not None:
            root.iteration.backward.gathered.append(self.index)

    def prepare_unshard(self, *, ahead: bool) -> list[tuple[FlatParamHandle, UnshardSource]]:
        """The handles that are sharded, and may take memory to be gathered now, maybe `ahead` of their use; and what
        each comes from.

        Those that come without communication are on their way then.
        """
        sharded: list[tuple[FlatParamHandle, UnshardSource]] = []
        resources = self.resources
        for handle, _, grads in self.kinds:
            if grads.slots.shares and grads.arrived:
                self._refuse_to_gather_again()
            if handle.state is SHARDED:
                if grads.reducing:
                    grads.return_inputs()
                source = self._source_of(handle)
                if resources.limiter.held:
                    resources.limiter.make_room(handle.buffer(source.dtype), ahead=ahead)
                if source.is_local:
                    handle.launch_unshard(source, resources.streams.unshard)
                    resources.limiter.record_upload()
                    self.record_event("upload")
                else:
                    sharded.append((handle, source))
        return sharded

    def _source_of(self, handle: FlatParamHandle) -> UnshardSource:
        """What the unsharded form of `handle`, which is sharded, comes from now."""
        dtype = self.dtype_of(handle)
        if handle.kept_source is not None:
            handle.drop_stale_source()
            if handle.kept_source is not None and handle.kept_source.serves(dtype):
                return handle.kept_source
        return handle.shard_source(self.gather, dtype)

    def apply_shard_writes(self) -> None:
        """What was written to the shards earlier in this forward is what the unit is to compute with: free what was
        gathered before. [Note: shards by hand]"""
        for handle, views, _ in self.kinds:
            if views.mode is not SHOWS_SHARD:
                continue
            if not (handle.use_orig_params or handle.flat_shows_shard):
                views.adopt_flat()
            if handle.state is not SHARDED and handle.writes.was_written_since_gathered:
                if handle.state is GATHERING:
                    handle.wait_unshard()
                self.resources.free(handle)

    def wait_unshard(self) -> None:
        """Order the caller after the gathers and let the leaves show the whole."""
        arrived = False
        for handle, views, _ in self.kinds:
            if handle.state is GATHERING:
                if views.some_hidden:
                    views.unhide()
                handle.wait_unshard()
                arrived = True
        if arrived:
            self.record_event("gathered")
        for views in self.views:
            views.is_left_unsharded = False
            if views.mode is not SHOWS_UNSHARDED:
                views.show(SHOWS_UNSHARDED)
            elif views.tracks_writes:
                views.unhide()
            if views.extended:
                views.install_extended()

    def track_writes(self, *, described_as_unsharded: bool = False) -> None:
        """What users write to the unsharded parameters until the unit computes again would be lost: notice it."""
        for views in self.views:
            views.track_writes(described_as_unsharded=described_as_unsharded)

    def check_left_unsharded(self) -> None:
        """Refuse what was written to the unsharded parameters that a forward has left, which are about to be freed.

        Precondition: no backward has reached the unit since.
        """
        for views in self.views:
            if views.mode is SHOWS_UNSHARDED and self.phase is not SUMMONED:
                check_exposed(views, self.name)

    def reshard_unused(self) -> None:
        """Free what was gathered ahead and is not used after all."""
        unused = [handle for handle in self.handles if handle.state is GATHERING]
        for handle in unused:
            handle.wait_unshard()
            self.resources.free(handle)
        if unused:
            self.record_event("reshard")

    def launch_requested(self) -> None:
        """Issue the all-gathers because a user asks for the parameters. Collective over the shard axis."""
        self.write_back()
        self._versions_at_request = [handle.writes.all for handle in self.handles]
        self.persists_between_iterations = self.is_between_iterations() and self.groups.shard.size > 1
        self.launch_unshard(ahead=True)

    def retire_request(self, *, written: bool) -> None:
        """Check what a user had unsharded between iterations, and free it if the shard was `written` to since, or is
        about to be: it will be gathered anew.

        Raises UsageError for what a user put in its place.
        """
        keeps = self.persists_between_iterations or (self.groups.shard.size == 1 and self.is_unsharded)
        if keeps and not self.is_between_iterations():
            stale = any([handle.writes.is_stale for handle in self.handles])
            try:
                for views in self.views:
                    check_requested(views, self.name)
            finally:
                if written or stale:
                    self.reshard(SHOWS_SHARD)

    def show_shapes(self) -> None:
        """A backward that does not read the parameters begins."""
        for views in self.views:
            views.show(SHOWS_SHAPE)

    def reshard(self, mode: ViewMode) -> None:
        """Free the unsharded parameters; the leaves show `mode` (the whole again where the shard is the whole, and
        residents of the device between forward and backward)."""
        freed = False
        for handle, views, grads in self.kinds:
            if handle.state is GATHERING:
                handle.wait_unshard()
            if handle.state is UNSHARDED:
                if handle.persistence is DEVICE:
                    if mode is SHOWS_SHARD:
                        views.show(mode)
                    elif mode is SHOWS_NOTHING:
                        views.track_writes()
                elif handle.unsharded.buffer is not None or mode is SHOWS_SHARD:
                    if views.tracks_writes and self.root.iteration.backward is not None:
                        check_exposed(views, self.name)  # a backward that did not reach it, or not yet
                    if grads.slots.shares and grads.take_over_buffer(
                        functools.partial(self.resources.limiter.free_later, handle.name)
                    ):
                        handle.reshard()
                    else:
                        self.resources.free(handle)
                    views.show(mode)
                    freed = True
            else:
                views.show(mode)
        if freed:
            self.record_event("reshard")

    def reshard_after_forward(self, *readers: Unit) -> None:
        """Free the unsharded parameters; where the backward of one of the `readers` is to come, they may stay among
        the ranks of the post-forward axis. [Note: post-forward shards]"""
        if self.post_forward_gather is not None and any(map(self.root.iteration.record.awaits, readers)):
            for handle in self.handles:
                if handle.state is UNSHARDED and handle.persistence is None:
                    unsharded = handle.unsharded.flat
                    handle.keep(
                        PostForwardShard(unsharded, handle.layout, self.post_forward_gather, tracker=handle.tracker)
                    )
            self.record_event("portion")
        self.reshard(SHOWS_NOTHING)

    def drop_post_forward_shards(self) -> None:
        """A backward that still comes gathers over the shard axis."""
        for handle in self.handles:
            if handle.kept_source is not None and handle.kept_source.as_of_forward:
                handle.drop_kept_source()

    @property
    def has_post_forward_shards(self) -> bool:
        """Whether the next backward gathers over the post-forward axis."""
        return self.post_forward_gather is not None and any(
            handle.kept_source is not None and handle.kept_source.as_of_forward for handle in self.handles
        )

    @property
    def gradients_occupy_params(self) -> bool:
        """Whether gradients lie in places of parameters while the unit is unsharded. [Note: slot sharing]"""
        return bool([grads for grads in self.grads if grads.occupies_params])

    def _refuse_to_gather_again(self) -> NoReturn:
        fail(
            UsageError(
                f"unit {self.label}: its forward runs again inside a backward, after gradients have taken the places "
                "of its parameters; no backward before did that. Catch this on all ranks and run the step again: in "
                "units of this class gradients have memory of their own from now on"
            )
        )

    def reduce(self) -> list[Reduction]:
        """Issue the reductions of all kinds that take part. Collective over the shard axis."""
        streams = self.resources.streams
        scatter, _ = self.reducers
        return [
            Reduction([part], scatter, self.second_stage_reducer, streams.reduce, streams.replicate)
            for part in self.reduction_inputs()
        ]

    def reduction_inputs(self) -> list[ReductionInput]:
        """The gradients of all kinds that take part in a reduction, for it."""
        if self.gradients_occupy_params:
            self.reshard(SHOWS_NOTHING)
        self.record_event("reduce")
        completes, hook = self.completes, self.options.all_reduce_hook
        return [grads.start_reduction(completes=completes, hook=hook) for grads in self.grads if grads.participates]

    @property
    def completes(self) -> bool:
        """Whether a reduction brings the gradient, not a partial sum. [Note: partial sums]"""
        return self.options.schedule.all_reduce or self.reducers[1] is None

    @property
    def has_all_gradients(self) -> bool:
        """Whether this rank brought gradients of all leaves to what it reduces, so that it need not hear of others."""
        return all(grads.expected <= grads.contributed for grads in self.grads)

    @property
    def second_stage_reducer(self) -> Reducer | None:
        """What carries out the second stage of a reduction now; None where there is none."""
        return self.reducers[1] if self.completes else None

    # -- the end of an iteration -------------------------------------------------------------------------------------

    def reset_to_idle(self, *, keep_unsharded: bool = False) -> None:
        """Return to between iterations: leaves show the shard; unsharded memory is freed unless it is to be kept."""
        self.persists_between_iterations = (
            keep_unsharded
            and self.options.schedule.keeps_by_choice
            and self.groups.shard.size > 1
            and self.is_unsharded
        )
        if keep_unsharded:
            for handle, views, _ in self.kinds:
                if handle.state is GATHERING:
                    handle.wait_unshard()
                views.show(SHOWS_SHARD)
        else:
            self.reshard(SHOWS_SHARD)
        if self.post_forward_gather is not None:
            self.drop_post_forward_shards()
        self.phase = IDLE

    def retain_for_double_backward(self) -> None:
        """A backward that will be differentiated again has ended: parameters stay whole, gradients stay in flight."""
        self.phase = IDLE
        for grads in self.grads:
            grads.retain_for_double_backward()
        self.track_writes()

    def finalize_grads(self) -> list[FlatParamHandle]:
        """Make the reduced gradients `.grad`; the handles of which that completes them."""
        return [handle for handle, _, grads in self.kinds if grads.finalize_grads()]

    def finalize_grads_later(self) -> Iterator[Callable[[], None]]:
        """`finalize_grads` without waiting for what is being reduced; what waits for it, by handle. [Note: awaited]"""
        for grads in self.grads:
            if grads.reducing:
                yield grads.finalize_grads_later()
            else:
                grads.finalize_grads()

    def rollback(self) -> bool:
        """After a failed backward, at once: leaves show the shard, `.grad` is what it was. True if a window was lost.

        Runs where an exception is being raised: no waiting, no communication.
        """
        if self.phase is not SUMMONED:  # else the parameters are the user's, and the backward did not reach them
            for views in self.views:
                views.show(SHOWS_SHARD)
            for grads in self.grads:
                grads.unstash_grads()
        return any(grads.accumulation.window_open for grads in self.grads)

    def is_between_iterations(self) -> bool:
        """Whether the leaves show the shard, as between iterations."""
        return all(views.mode is SHOWS_SHARD for views in self.views)

    def write_back(self) -> None:
        """Take over what the user put in the leaves' place; free a kept buffer that is out of date.

        Raises UsageError for changes that cannot be taken over.
        """
        changed = ParamRef.changed(self.param_refs)
        if self.shared_refs:
            changed += ParamRef.changed(self.shared_refs)
        if changed and _torch.in_functional_call():
            refuse_functional_call(changed, self.label)
        if changed and self.is_between_iterations():
            check_param_refs(changed, self.shared_refs, self.root.names_of_leaves(), self.label)
        for kind, (handle, views, _) in enumerate(self.kinds):
            if views.mode is SHOWS_SHARD:
                if views.some_hidden:
                    views.unhide()
                before = handle.precision
                if handle.state is UNSHARDED and handle.flat_param.dtype != handle.shard.dtype:
                    self.resources.free(handle)  # before its shard becomes another one
                wrote = views.write_back(changed)
                if handle.precision is not before:
                    self.root.dtypes_changed()
                if handle.state is UNSHARDED and (wrote or self._is_stale(handle)):
                    self.resources.free(handle)
                elif handle.state is GATHERING and handle.writes.all != self._versions_at_request[kind]:
                    handle.wait_unshard()
                    self.resources.free(handle)
                if handle.kept_source is not None and handle.state is SHARDED:
                    handle.drop_stale_source()
            elif self.phase is not SUMMONED:  # else the parameters are the user's
                check_exposed(views, self.name)

    def fetch(self, kind: int) -> None:
        """Gather a resident of this unit, which is not where it stays. Collective over the shard axis.

        Precondition: its leaves show the shard.
        """
        handle, resources = self.handles[kind], self.resources
        if handle.state is SHARDED:  # it is not where a user has asked for the unit, or it stayed after a backward
            source = self._source_of(handle)
            if resources.limiter.held:
                resources.limiter.make_room(handle.buffer(source.dtype), ahead=False)
            handle.launch_unshard(source, resources.streams.unshard)
            if source.is_local:
                resources.limiter.record_upload()
        if handle.state is GATHERING:
            handle.wait_unshard()
        self.record_event("keep")
        if handle.persistence is HOST:
            handle.drop_kept_source()
            cache = HostCache(handle.unsharded.flat, tracker=handle.tracker)
            handle.keep(cache)
            resources.free(handle)
            cache.versions = handle.writes.all

    def evict(self, kind: int) -> None:
        """Free what stays of a resident, at once unless a backward is to read it: then it is no resident any more."""
        handle, views = self.handles[kind], self.views[kind]
        if handle.kept_source is not None and not handle.kept_source.as_of_forward:
            handle.drop_kept_source()
        if handle.persistence is DEVICE and handle.state is UNSHARDED:
            if views.mode is SHOWS_SHARD:
                self.resources.free(handle)
            else:
                handle.persistence = None

    def evict_all(self) -> None:
        """Free what stays of all residents; the next forward gathers it."""
        for kind in range(len(self.handles)):
            self.evict(kind)

    def dtype_of(self, handle: FlatParamHandle) -> torch.dtype:
        """In which dtype the unit computes with the handle's parameters now."""
        if not self.mixed_precision.full_precision_in_eval:
            return handle.precision.compute
        return handle.precision.master if self.root.in_full_precision(self) else handle.precision.compute

    def _is_stale(self, handle: FlatParamHandle) -> bool:
        """Whether what was kept unsharded is not what a gather would bring: the shard was written to since, or the
        dtype is that of evaluation, and this is training."""
        return handle.writes.is_stale or handle.unsharded.flat.dtype != self.dtype_of(handle)


def check_hooks(handle: FlatParamHandle, *, on_leaves: bool) -> None:
    """Refuse hooks that would never run, where a flat parameter has the gradients and original ones see them pass.

    `on_leaves`: some leaves have hooks that are not ours.
    """
    if not (on_leaves or _torch.has_hooks(handle.flat_param)):
        return
    where = f"of unit {handle.name or '<root>'!r}"
    hooked = hooks.user_hooked(handle.leaves)
    if hooked:
        fail(
            UsageError(
                f"parameter {handle.layout.params[hooked[0]].name!r} {where} has a post-accumulate hook, but with "
                "use_orig_params=False no gradient is accumulated into it: the hook would never run. Register it on "
                "the flat parameter, which model.parameters() lists, or wrap with use_orig_params=True"
            )
        )
    if _torch.has_hooks(handle.flat_param):
        fail(
            UsageError(
                f"the flat parameter {where} has a hook of register_hook(), but the backward computes gradients of the "
                "original parameters: it would never run. Use register_post_accumulate_grad_hook(), which sees the "
                "sharded gradient, or register_hook() on the parameters of the module inside, which sees this rank's"
            )
        )
