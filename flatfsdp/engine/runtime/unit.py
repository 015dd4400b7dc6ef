"""One unit: the parameters that one wrapped module and no nested unit owns, gathered, freed and reduced together.

[Note: unit] A unit's parameters live in one handle per kind, whose collectives are issued together. Here is *how* they
are gathered, freed, reduced and brought to rest. *When* is decided by the drivers of forwards and backwards
(`forward_driver.py`, `backward_hooks.py`), *in which order* among units by the schedule. A unit does not use its model,
which code outside finds by it; it gets the values that it needs (`Resources`, `UnitAxes`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn

from ...errors import UsageError, fail, label_of
from ..base import _torch
from ..comm.axes import ProcessGroups
from ..config.unit_options import UnitOptions
from ..flat.flat_param import FlatParamHandle
from ..flat.gradients import Gradients
from ..flat.guard import PLAIN, Guard
from ..flat.param_refs import ParamRef, flat_name
from ..flat.sources import DEVICE, UnshardSource
from ..flat.states import (
    GATHERING,
    IDLE,
    PHASE_STEPS,
    SHARDED,
    SUMMONED,
    UNSHARDED,
    Left,
    Phase,
    refuse_step,
)
from ..flat.views import SHOWS_NOTHING, SHOWS_SHARD, SHOWS_UNSHARDED, ParamViews, ViewMode
from .entries import Entries
from .resources import Resources
from .unit_state import BuiltWith, KeptUnsharded, Resolved, UnitAxes, UnitBackward, UnitPosition, WatchedLeaves

_state_of, _requires_grad = attrgetter("state"), attrgetter("requires_grad")  # faster than a generator each time


class Unit:
    """The parameters that one wrapped module and no nested unit owns.

    Attributes:
        entries: the modules whose forward runs it.
        position: in its model.
        handles: one per kind of parameter, none if the unit owns no parameter.
        views, grads: for each handle, the views that its leaves show, and its gradients; kinds: all three.
        param_refs: where modules of this unit hold the handles' leaves; flat_refs: those of flat parameters, in the
            module inside the wrapper, as in FSDP1.
        owning_units: units that own parameters which modules of this unit hold too (tied); unsharded whenever this one
            is. shared_refs: where modules of this unit hold those.
        sharing_units: units that hold parameters of this one too, weakly.
        groups: the axes over which it is sharded; axes: those of handles that are elsewhere, too.
        guard: looks for writes of users to unsharded parameters.
        options: chosen by users; resolved: the values that follow from them, once the unit is connected.
        model: the model that it belongs to, held weakly; None once that was deleted.
        run_summoned: runs a method of its module with arguments while the unit is SUMMONED; set by what summons it.
        phase: [Note: states].
        backward: the progress of its backward.
        around: runs its forward, in place of the driver; None: nothing is to be done around it.
    """

    resources: Resources
    resolved: Resolved
    model: Callable[[], Any]
    run_summoned: Callable[[Unit, tuple[Any, ...], dict[str, Any], Callable[..., Any]], Any]

    def __init__(
        self,
        entries: Entries,
        handles: Sequence[FlatParamHandle],
        param_refs: Sequence[ParamRef],
        *,
        built: BuiltWith,
        groups: ProcessGroups,
        elsewhere: Mapping[FlatParamHandle, ProcessGroups] = MappingProxyType({}),
        options: UnitOptions,
        owning_units: Sequence[Unit] = (),
        shared_refs: Sequence[ParamRef] = (),
        guard: Guard = PLAIN,
    ) -> None:
        self.position = UnitPosition()
        self.entries = entries
        self.guard = guard
        self.handles = list(handles)
        self._retarget(param_refs)
        self.views = [ParamViews(handle, guard) for handle in self.handles]
        self.grads = [Gradients(handle, views) for handle, views in zip(self.handles, self.views, strict=True)]
        self.kinds = list(zip(self.handles, self.views, self.grads, strict=True))
        self.param_refs, self.shared_refs = list(param_refs), list(shared_refs)
        self.flat_refs: list[ParamRef] = []
        for kind, handle in enumerate(self.handles):
            self.flat_refs += handle.face.list_in(entries.first, flat_name(kind))
        self.leaves = WatchedLeaves(len(self.handles))
        self.sharing_units: list[weakref.ref[Unit]] = []
        self.owning_units: list[Unit] = []
        self.share_params_of(owning_units)
        self.built = built
        self._encloses_others: bool | None = None  # a cached property would give it a slow dictionary
        self.groups, self.axes = groups, UnitAxes(groups, elsewhere)
        self.options = options
        self.phase = IDLE
        self.kept = KeptUnsharded()
        self.backward = UnitBackward()
        self.around: Callable[..., Any] | None = None

    @property
    def encloses_others(self) -> bool:
        """Whether its module has modules of other units inside."""
        if self._encloses_others is None:
            inside = {each for entry in self.entries for each in entry.modules()}
            self._encloses_others = not inside.issubset(self.built.modules)
        return self._encloses_others

    # -- identity ----------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The name in messages."""
        return label_of(self.position.name)

    def _retarget(self, param_refs: Iterable[ParamRef]) -> None:
        """Let `param_refs`, places of parameters as users have them, refer to their leaves."""
        for param_ref in param_refs:
            for handle in self.handles:
                param_ref.leaf = handle.face.leaf_of(param_ref.leaf)

    def share_params_of(self, owning_units: Sequence[Unit]) -> None:
        """Hold parameters of `owning_units` too."""
        for owning_unit in owning_units:
            owning_unit._retarget(self.shared_refs)
        for owning_unit in owning_units:
            if owning_unit not in self.owning_units:
                owning_unit.sharing_units.append(weakref.ref(self))
        self.owning_units = list(owning_units)

    def alive_sharing_units(self) -> Iterator[Unit]:
        """Those of `sharing_units` that are still alive."""
        return (unit for ref in self.sharing_units if (unit := ref()) is not None)

    def enter_phase(self, phase: Phase) -> None:
        """Change the phase, as the table allows."""
        if phase not in PHASE_STEPS[self.phase]:
            refuse_step(self.phase, phase, PHASE_STEPS, self.label, self.resources.events)
        self.phase = phase

    def record_event(self, name: str) -> None:
        """Record an event of this unit."""
        append = self.resources.events.append  # of a deque: faster than a call of a method
        append((name, self.position.name, self.phase._value_))

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def is_tied(self) -> bool:
        """Whether modules of several units hold some of these parameters, or see them transformed."""
        return bool(self.owning_units or self.sharing_units) or any([views.extended for views in self.views])

    def trainable_leaves(self) -> list[nn.Parameter]:
        """The parameters that require a gradient."""
        found: list[nn.Parameter] = []
        for handle in self.handles:
            flags = handle.face.flags
            found += compress(handle.leaves, map(_requires_grad, handle.leaves) if flags is None else flags)
        return found

    @property
    def has_frozen(self) -> bool:
        """Whether some parameters require no gradient."""
        with _torch.as_plain_tensors():  # leaves may be described as shards
            for handle in self.handles:
                if not all(map(_requires_grad, handle.leaves)):
                    return True
        return False

    @property
    def in_full_precision(self) -> bool:
        """Whether the unit computes in its master dtype now (in evaluation, if requested)."""
        return self.built.mixed_precision.full_precision_in_eval and not any(each.training for each in self.entries)

    def dtype_of(self, handle: FlatParamHandle) -> torch.dtype:
        """The dtype in which the unit computes with the handle's parameters now."""
        if not self.built.mixed_precision.full_precision_in_eval:
            return handle.precision.compute
        return handle.precision.master if self.in_full_precision else handle.precision.compute

    @property
    def is_sharded(self) -> bool:
        """Whether all handles are sharded, except for those that stay unsharded on the device."""
        return not [h for h in self.handles if h.state is not SHARDED and h.persistence is not DEVICE]

    @property
    def is_unsharded(self) -> bool:
        """Whether all handles are unsharded, or being gathered."""
        return SHARDED not in map(_state_of, self.handles)

    @property
    def shows_shard(self) -> bool:
        """Whether users see the shard, as between iterations."""
        return all(views.mode is SHOWS_SHARD for views in self.views)

    # -- unsharding --------------------------------------------------------------------------------------------------

    def launch_unshard(self, *, ahead: bool = False) -> bool:
        """Issue the all-gathers of all sharded handles; `ahead`: before their use. Collective over the shard axis, or
        over that of shards that a feature retained. False if there was nothing to gather from other ranks."""
        resources = self.resources
        sharded = self.prepare_unshard(ahead=ahead)
        for handle, source in sharded:
            handle.launch_unshard(source, resources.streams.unshard)
            if source.reads_host:
                resources.limiter.record_upload()
        if sharded:
            resources.events.append(("gather", self.position.name, self.phase._value_))
        return bool(sharded)

    def prepare_unshard(self, *, ahead: bool) -> list[tuple[FlatParamHandle, UnshardSource]]:
        """Make room in memory for all sharded handles, possibly `ahead` of their use; returns them with their sources.

        Those with local sources are not returned: they are launched here.
        """
        sharded: list[tuple[FlatParamHandle, UnshardSource]] = []
        resources = self.resources
        for handle, _, grads in self.kinds:
            if grads.slots.shares and grads.arrived:
                fail(
                    UsageError(
                        f"unit {self.label}: its forward runs again inside a backward, after gradients have reused the "
                        "memory of its parameters; no earlier backward did that. Catch this on all ranks and run the "
                        "step again: units of this class give gradients separate memory from now on"
                    )
                )
            if handle.state is SHARDED:
                if grads.reducing:
                    grads.return_inputs()
                source = self.source_of(handle)
                if resources.limiter.held:
                    resources.limiter.make_room(handle.buffer(source.dtype), ahead=ahead)
                if source.is_local:
                    handle.launch_unshard(source, resources.streams.unshard)
                    resources.limiter.record_upload()
                    self.record_event("upload")
                else:
                    sharded.append((handle, source))
        return sharded

    def source_of(self, handle: FlatParamHandle) -> UnshardSource:
        """The present source of the unsharded parameters of `handle`, which is sharded."""
        dtype = self.dtype_of(handle)
        if handle.kept_source is not None:
            handle.drop_stale_source()
            if handle.kept_source is not None and handle.kept_source.serves(dtype):
                return handle.kept_source
        transports = self.axes.transports_of(handle) if self.axes.elsewhere else self.axes.own_transports
        return handle.shard_source(
            transports.gather if handle.precision.gather is None else transports.quantized, dtype
        )

    def wait_unshard(self) -> None:
        """Order the caller after the gathers and let the leaves show the unsharded parameters."""
        arrived = False
        for handle in self.handles:
            if handle.state is GATHERING:
                handle.wait_unshard()
                arrived = True
        if arrived:
            self.resources.events.append(("gathered", self.position.name, self.phase._value_))
        for views in self.views:
            if views.mode is not SHOWS_UNSHARDED:
                views.show(SHOWS_UNSHARDED)
            elif views.tracks_writes or views.left in (Left.SET_ASIDE, Left.HELD):
                views.end_tracking()
            views.left = Left.COMPUTING
            if views.extended:
                views.install_extended()

    def track_writes(self, *, requested: bool = False, ended: bool = False) -> None:
        """Detect writes of users to the unsharded parameters until the unit computes again: these would be lost.
        `ended`: a backward has."""
        for views in self.views:
            views.track_writes(requested=requested, ended=ended)

    def reshard(self, mode: ViewMode, *, unreached: bool = False) -> None:
        """Free the unsharded parameters and show `mode`. Leaves still show the unsharded parameters if the shard is all
        of them, or if they stay on the device between forward and backward.

        `unreached`: a backward runs that may not have reached the unit: writes to parameters that a forward has left
        unsharded are refused.
        """
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
                    if unreached and views.left is not Left.COMPUTING:
                        self.guard.check_left(self)
                    limiter = self.resources.limiter
                    handed_over = grads.slots.shares and grads.take_over_buffer(
                        functools.partial(limiter.free_later, handle.name)
                    )
                    buffer = handle.reshard()
                    if not (buffer is None or handed_over):
                        limiter.free_later(handle.name, buffer)
                    views.show(mode)
                    freed = True
            elif views.mode is not mode or (mode is SHOWS_SHARD and views.guarded):
                views.show(mode)
        if freed:
            self.resources.events.append(("reshard", self.position.name, self.phase._value_))

    def drop_retained(self) -> None:
        """Drop the shards that a feature retained: a later backward gathers over the shard axis."""
        for handle in self.handles:
            if handle.kept_source is not None and handle.kept_source.as_of_forward:
                handle.drop_kept_source()

    # -- gradients ---------------------------------------------------------------------------------------------------

    def pick_up_grads(self, *, sound: bool = False) -> None:
        """Collect gradients that have arrived while hooks were muted; `sound`: and end that. [Note: muted hooks]"""
        for grads in self.grads:
            if grads.muted:
                grads.pick_up(sound=sound)

    def has_gradients(self) -> bool:
        """Whether any gradient has arrived in the running backward."""
        self.pick_up_grads()
        return any(grads.arrived for grads in self.grads)

    def finalize_grads(self) -> list[FlatParamHandle]:
        """Make the reduced gradients `.grad`; returns the handles whose gradients this completes."""
        complete = []
        for handle, _, grads in self.kinds:  # a comprehension is a call
            if grads.finalize_grads():
                complete.append(handle)
        return complete

    # -- the end of an iteration -------------------------------------------------------------------------------------

    def reset_to_idle(self, *, keep_unsharded: bool = False) -> None:
        """Return to the state between iterations: users see the shard; unsharded parameters are freed or kept."""
        if self.phase is SUMMONED:  # a user may write to the parameters; units around it may have run
            return
        self.kept.by_choice = (
            keep_unsharded and self.options.schedule.keeps_by_choice and self.axes.is_spread and self.is_unsharded
        )
        if keep_unsharded:
            for handle, views, _ in self.kinds:
                if handle.state is GATHERING:
                    handle.wait_unshard()
                views.show(SHOWS_SHARD)
        else:
            self.reshard(SHOWS_SHARD)
        if self.kept.shards:  # of a pending gather
            self.kept.shards.clear()
        if self.kept.retain is not None:
            self.drop_retained()
        self.phase = IDLE
        self.backward = UnitBackward()


def follow_requires_grad(units: Iterable[Unit]) -> None:
    """Give leaves the `requires_grad` that users have set on their holders, before a backward."""
    for unit in units:
        for handle in unit.handles:
            handle.face.follow_requires_grad(of_leaves=False)


def refuse_without_model(unit: Unit) -> NoReturn:
    """Refuse to use `unit`, whose model was deleted."""
    raise UsageError(
        f"unit {unit.label}: the outermost wrapper of its model has been deleted, and with it the communicators that "
        "its units share. Keep a reference to the outermost wrapper while any part of it is in use; or wrap the part "
        "again, and load the model's state dict into it"
    )


def shared_under_reentrance(unit: Unit, other: Unit) -> str:
    """Words that refuse a reentrant checkpoint around `unit`, which shares parameters with `other`: their gradients
    would arrive in several graph tasks, and ranks would not know when the last has come."""
    return (
        f"unit {unit.label}, which shares parameters with unit {other.label}, runs under a reentrant checkpoint, or "
        "inside another custom autograd Function. Use checkpoint(..., use_reentrant=False), or wrap the modules that "
        "share parameters as one unit"
    )
