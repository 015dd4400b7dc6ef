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
from ..comm.transport import ProcessGroups, Reducer, Transport
from ..config.schedule_options import AS_BUILT, Schedule
from ..config.strategy import Traits
from ..config.unit_options import UnitOptions
from ..flat.flat_param import FlatParamHandle
from ..flat.gradients import Gradients
from ..flat.host_cache import DEVICE, HOST
from ..flat.reduction import Reduction, ReductionInput
from ..flat.states import GATHERING, IDLE, PHASE_STEPS, SHARDED, SUMMONED, UNSHARDED, Phase, refuse_step
from ..flat.views import (
    NOTHING,
    SHAPE,
    SHARD,
    WHOLE,
    ParamRef,
    ParamViews,
    ViewMode,
    check_exposed,
    check_homes,
    check_requested,
    refuse_functional_call,
)

if TYPE_CHECKING:
    from ..flat.extensions import TransformedParam
    from .model import Root
    from .unit import Unit


_state_of, _requires_grad = attrgetter("state"), attrgetter("requires_grad")  # faster than a generator each time


class UnitData:
    """The parameters that one wrapped module and no nested unit owns.

    Attributes:
        name: path from the root's module; "" for the root.
        handles: one per kind of parameter, none if the unit owns no parameter.
        shown, grads: for each handle, what its leaves show and its gradients; kinds: all three.
        homes: where modules of this unit hold the handles' leaves.
        owners: units that own parameters which modules of this unit hold too (tied); unsharded whenever this one is.
        aliases: where modules of this unit hold those.
        device_mesh: the mesh that `groups` are of, where a user gave one; pickles do not have it.
        choices: what users chose.
        phase: [Note: lifecycle].
        kept: stays unsharded between iterations, because a user said so.
        doubtful: some ranks may have written to their shards, and others not.
        beginnings: of the parameters, until they have been compared with the other ranks'.
        gather, scatter, replicate: the transports for the collectives; replicate is None where there is one copy.
        reducers: the last two, or a communication hook in the place of one of them.
        neighbours: the transport among those who keep portions after a forward; None where nobody does. [Note:
            portions]
    """

    gather: Transport
    scatter: Transport
    replicate: Transport | None
    reducers: tuple[Reducer, Reducer | None]

    def __init__(
        self,
        module: nn.Module,
        handles: Sequence[FlatParamHandle],
        homes: Sequence[ParamRef],
        *,
        traits: Traits,
        groups: ProcessGroups,
        device_mesh: Any = None,
        mixed_precision: MixedPrecision,
        cpu_offload: CPUOffload,
        owners: Sequence[UnitData] = (),
        aliases: Sequence[ParamRef] = (),
        schedule: Schedule = AS_BUILT,
    ) -> None:
        self.name = ""
        self.module = module
        self.handles = list(handles)
        self.homes = list(homes)
        self.traits = traits
        self.groups = groups
        self.device_mesh = device_mesh
        self.mixed_precision = mixed_precision
        self.cpu_offload = cpu_offload
        self.choices = UnitOptions(schedule)
        self.owners: list[Any] = []
        self._borrowers: list[weakref.ref[Any]] = []
        self.tied_modules: list[nn.Module] = []  # those of the owners, in a copy: all are there once its root is
        self.borrow_from(owners)
        self.aliases = list(aliases)
        self.phase = IDLE
        self.shown = [ParamViews(handle) for handle in self.handles]
        self.grads = [Gradients(handle, shown) for handle, shown in zip(self.handles, self.shown, strict=True)]
        self.kinds = list(zip(self.handles, self.shown, self.grads, strict=True))
        self.neighbours: Transport | None = None
        self._root: weakref.ref[Root] | None = None
        self.own_root: Root | None = None  # until the wrapper takes it: a root owns its units, and no cycle may remain
        self.kept = False
        self.doubtful = False
        self._versions_asked: list[tuple[int, ...]] = []  # of the handles, when a user asked for them unsharded
        self.beginnings: InitialChecksums | None = None

    def extend(self, extended: Sequence[TransformedParam]) -> None:
        """Let modules see what extensions make of some leaves."""
        for handle, shown, _ in self.kinds:
            leaves = set(map(id, handle.leaves))
            shown.extended = [each for each in extended if id(each.leaf) in leaves]

    def borrow_from(self, owners: Sequence[UnitData]) -> None:
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
            raise UsageError(
                f"unit {self.label}: the model that it was part of has been deleted, and with it what its parts share: "
                "communicators, and the order of their collectives. Hold on to the outermost wrapper for as long as a "
                "part of it is used; what is to be used otherwise is built anew and loads the model's state dict"
            )
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
        if phase not in PHASE_STEPS[self.phase]:
            refuse_step(self.phase, phase, PHASE_STEPS, self.name or "<root>", self._trace)
        self.phase = phase

    def note(self, kind: str) -> None:
        """Record an event of this unit."""
        self._trace.append((kind, self.name, self.phase._value_))

    # -- choices -----------------------------------------------------------------------------------------------------

    def choose(self, **changes: Any) -> None:
        """Change what users chose."""
        self.choices = replace(self.choices, **changes)
        self.root.choices_changed()

    def choose_schedule(self, **changes: Any) -> None:
        """Change the schedule that users chose. [Note: schedule]"""
        self.choose(schedule=replace(self.choices.schedule, **changes))

    @property
    def hidden(self) -> list[ParamRef]:
        """The homes and aliases that give up the registration, a flat parameter having it."""
        flattened = {
            id(leaf)
            for unit in (self, *self.owners)
            for handle in unit.handles
            if not handle.use_orig_params
            for leaf in handle.leaves
        }
        return [home for home in (*self.homes, *self.aliases) if id(home.leaf) in flattened]

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
                if handle.trainable
                for spec in handle.layout.params
            ),
            default=0,
        )

    @property
    def is_tied(self) -> bool:
        """Whether modules of several units hold some of these parameters, or see them transformed."""
        return bool(self.owners or self._borrowers) or any([shown.extended for shown in self.shown])

    def _alive_borrowers(self) -> Iterator[Any]:
        for ref in self._borrowers:
            if (unit := ref()) is not None:
                yield unit

    # -- data --------------------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether all data is sharded that does not stay on the device."""
        return not [h for h in self.handles if h.state is not SHARDED and h.residence is not DEVICE]

    @property
    def is_whole(self) -> bool:
        """Whether all data is unsharded, or on its way."""
        return SHARDED not in map(_state_of, self.handles)

    def launch_unshard(self, *, ahead: bool = False) -> None:
        """Issue the all-gathers of whatever is sharded; `ahead`: before its use. Collective over the shard axis, or
        in a backward over the neighbours."""
        root = self.root
        sharded = self.prepare_unshard(root, ahead=ahead)
        for handle in sharded:
            if handle.portion is not None and _torch.in_backward():
                handle.launch_unshard_nearby(root.lanes.unshard)
                continue
            handle.launch_unshard(self.gather, root.lanes.unshard, dtype=self.dtype_of(handle))
            if handle.offload:
                root.limiter.note_upload()
        if sharded:
            self.note_gather(root)

    def note_gather(self, root: Root) -> None:
        """Gathers of this unit were issued."""
        self.note("gather")
        if root.backward is not None:
            root.backward.gathered.append(self)

    def prepare_unshard(self, root: Root, *, ahead: bool) -> list[FlatParamHandle]:
        """The handles that are sharded, and may take memory to be gathered now, maybe `ahead` of their use.

        Residents are on their way from the host then. [Note: residents]
        """
        sharded = []
        for handle, _, grads in self.kinds:
            if grads.sharing and grads.arrived:
                self._refuse_to_regain()
            if handle.state is SHARDED:
                if grads.reducing:
                    grads.return_inputs()
                if root.limiter.held:
                    root.limiter.make_room(handle.buffer(self._dtype_gathered(handle)), ahead=ahead)
                self._drop_old_host_copy(handle)
                if handle.host_copy is not None and handle.host_copy.dtype == self.dtype_of(handle):
                    handle.launch_upload(root.lanes.unshard)
                    root.limiter.note_upload()
                    self.note("upload")
                else:
                    sharded.append(handle)
        return sharded

    def take_writes(self) -> None:
        """What was written to the shards earlier in this forward is what the unit is to compute with: free what was
        gathered before. [Note: shards by hand]"""
        for handle, shown, _ in self.kinds:
            if shown.exposure is not SHARD:
                continue
            if not (handle.use_orig_params or handle.flat_shows_shard):
                shown.adopt_flat()
            if handle.state is not SHARDED and handle.was_written_since_gathered:
                if handle.state is GATHERING:
                    handle.wait_unshard()
                self.root.free(handle)

    def wait_unshard(self) -> None:
        """Order the caller after the gathers and let the leaves show the whole."""
        arrived = False
        for handle, shown, _ in self.kinds:
            if handle.state is GATHERING:
                if shown.some_hidden:
                    shown.unhide()
                handle.wait_unshard()
                arrived = True
        if arrived:
            self.note("gathered")
        for shown in self.shown:
            shown.is_left = False
            if shown.exposure is not WHOLE:
                shown.show(WHOLE)
            elif shown.notices_writes:
                shown.unhide()
            if shown.extended:
                shown.install_extended()

    def notice_writes(self, *, described_as_whole: bool = False) -> None:
        """What users write to the unsharded parameters until the unit computes again would be lost: notice it."""
        for shown in self.shown:
            shown.notice_writes(described_as_whole=described_as_whole)

    def check_kept(self) -> None:
        """Refuse what was written to the unsharded parameters that a forward has left, which are about to be freed.

        Precondition: no backward has reached the unit since.
        """
        for shown in self.shown:
            if shown.exposure is WHOLE and self.phase is not SUMMONED:
                check_exposed(shown, self.name)

    def reshard_unused(self) -> None:
        """Free what was gathered ahead and is not used after all."""
        unused = [handle for handle in self.handles if handle.state is GATHERING]
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

    def take_back(self, *, written: bool) -> None:
        """Check what a user had unsharded between iterations, and free it if the shard was `written` to since, or is
        about to be: it will be gathered anew.

        Raises UsageError for what a user put in its place.
        """
        keeps = self.kept or (self.groups.shard.size == 1 and self.is_whole)
        if keeps and not self.is_between():
            stale = any([handle.is_stale for handle in self.handles])
            try:
                for shown in self.shown:
                    check_requested(shown, self.name)
            finally:
                if written or stale:
                    self.reshard(SHARD)

    def show_shapes(self) -> None:
        """A backward that does not read the parameters begins."""
        for shown in self.shown:
            shown.show(SHAPE)

    def reshard(self, exposure: ViewMode) -> None:
        """Free the unsharded parameters; the leaves show `exposure` (the whole again where the shard is the whole, and
        residents of the device between forward and backward)."""
        freed = False
        for handle, shown, grads in self.kinds:
            if handle.state is GATHERING:
                handle.wait_unshard()
            if handle.state is UNSHARDED:
                if handle.residence is DEVICE:
                    if exposure is SHARD:
                        shown.show(exposure)
                    elif exposure is NOTHING:
                        shown.notice_writes()
                elif handle.owns_unsharded or exposure is SHARD:
                    root = self.root
                    if shown.notices_writes and root.backward is not None:
                        check_exposed(shown, self.name)  # a backward that did not reach it, or not yet
                    if grads.sharing and grads.take_place(functools.partial(root.limiter.give_back, handle.name)):
                        handle.reshard()
                    else:
                        root.free(handle)
                    shown.show(exposure)
                    freed = True
            else:
                shown.show(exposure)
        if freed:
            self.note("reshard")

    def reshard_after_forward(self, *readers: Unit) -> None:
        """Free the unsharded parameters; where the backward of one of the `readers` is to come, they may stay among
        neighbours. [Note: portions]"""
        if self.neighbours is not None and any(map(self.root.record.awaits, readers)):
            for handle in self.handles:
                if handle.state is UNSHARDED and handle.residence is None:
                    handle.keep_portion(self.neighbours)
            self.note("portion")
        self.reshard(NOTHING)

    def drop_portions(self) -> None:
        """A backward that still comes gathers over the shard axis."""
        for handle in self.handles:
            handle.drop_portion()

    @property
    def holds_portions(self) -> bool:
        """Whether the next backward gathers from neighbours."""
        return self.neighbours is not None and any(handle.portion is not None for handle in self.handles)

    @property
    def places_are_taken(self) -> bool:
        """Whether gradients lie in places of parameters while the unit is unsharded. [Note: slot sharing]"""
        return bool([grads for grads in self.grads if grads.occupies_place])

    def _refuse_to_regain(self) -> NoReturn:
        fail(
            UsageError(
                f"unit {self.label}: its forward runs again inside a backward, after gradients have taken the places "
                "of its parameters; no backward before did that. Catch this on all ranks and run the step again: in "
                "units of this class gradients have memory of their own from now on"
            )
        )

    def reduce(self) -> list[Reduction]:
        """Issue the reductions of all kinds that take part. Collective over the shard axis."""
        lanes = self.root.lanes
        scatter, _ = self.reducers
        return [
            Reduction([part], scatter, self.completed_by, lanes.reduce, lanes.replicate) for part in self.hand_over()
        ]

    def hand_over(self) -> list[ReductionInput]:
        """The gradients of all kinds that take part in a reduction, for it."""
        if self.places_are_taken:
            self.reshard(NOTHING)
        self.note("reduce")
        completes, hook = self.completes, self.choices.all_reduce_hook
        return [grads.hand_over(completes=completes, hook=hook) for grads in self.grads if grads.awaited]

    @property
    def completes(self) -> bool:
        """Whether a reduction brings the gradient, not a partial sum. [Note: partial sums]"""
        return self.choices.schedule.all_reduce or self.reducers[1] is None

    @property
    def brings_all(self) -> bool:
        """Whether this rank brought gradients of all leaves to what it reduces, so that it need not hear of others."""
        return all(grads.expected <= grads.brought for grads in self.grads)

    @property
    def completed_by(self) -> Reducer | None:
        """What carries out the second stage of a reduction now; None where there is none."""
        return self.reducers[1] if self.completes else None

    # -- the end of an iteration -------------------------------------------------------------------------------------

    def rest(self, *, keep_whole: bool = False) -> None:
        """Return to between iterations: leaves show the shard; unsharded memory is freed unless it is to be kept."""
        self.kept = (
            keep_whole and self.choices.schedule.keeps_by_choice and self.groups.shard.size > 1 and self.is_whole
        )
        if keep_whole:
            for handle, shown, _ in self.kinds:
                if handle.state is GATHERING:
                    handle.wait_unshard()
                shown.show(SHARD)
        else:
            self.reshard(SHARD)
        for handle in self.handles:
            if handle.portion is not None:
                handle.drop_portion()
        self.phase = IDLE

    def pause(self) -> None:
        """A backward that will be differentiated again has ended: parameters stay whole, gradients stay in flight."""
        self.phase = IDLE
        for grads in self.grads:
            grads.pause()
        self.notice_writes()

    def settle(self) -> list[FlatParamHandle]:
        """Make the reduced gradients `.grad`; the handles of which that completes them."""
        return [handle for handle, _, grads in self.kinds if grads.settle()]

    def settle_later(self) -> Iterator[Callable[[], None]]:
        """`settle` without waiting for what is being reduced; what waits for it, by handle. [Note: awaited]"""
        for grads in self.grads:
            if grads.reducing:
                yield grads.settle_later()
            else:
                grads.settle()

    def undo(self) -> bool:
        """After a failed backward, at once: leaves show the shard, `.grad` is what it was. True if a window was lost.

        Runs where an exception is being raised: no waiting, no communication.
        """
        if self.phase is not SUMMONED:  # else the parameters are the user's, and the backward did not reach them
            for shown in self.shown:
                shown.show(SHARD)
            for grads in self.grads:
                grads.restore()
        return any(grads.window_open for grads in self.grads)

    def is_between(self) -> bool:
        """Whether the leaves show the shard, as between iterations."""
        return all(shown.exposure is SHARD for shown in self.shown)

    def write_back(self) -> None:
        """Take over what the user put in the leaves' place; free a kept buffer that is out of date.

        Raises UsageError for changes that cannot be taken over.
        """
        changed = ParamRef.changed(self.homes)
        if self.aliases:
            changed += ParamRef.changed(self.aliases)
        if changed and _torch.in_functional_call():
            refuse_functional_call(changed, self.label)
        if changed and self.is_between():
            check_homes(changed, self.aliases, self.root.names_of_leaves(), self.label)
        for kind, (handle, shown, _) in enumerate(self.kinds):
            if shown.exposure is SHARD:
                if shown.some_hidden:
                    shown.unhide()
                before = handle.precision
                if handle.state is UNSHARDED and handle.flat_param.dtype != handle.shard.dtype:
                    self.root.free(handle)  # before its shard becomes another one
                wrote = shown.write_back(changed)
                if handle.precision is not before:
                    self.root.dtypes_changed()
                if handle.state is UNSHARDED and (wrote or self._is_out_of_date(handle)):
                    self.root.free(handle)
                elif handle.state is GATHERING and handle.versions != self._versions_asked[kind]:
                    handle.wait_unshard()
                    self.root.free(handle)
                self._drop_old_host_copy(handle)
            elif self.phase is not SUMMONED:  # else the parameters are the user's
                check_exposed(shown, self.name)

    def _drop_old_host_copy(self, handle: FlatParamHandle) -> None:
        copy = handle.host_copy
        if copy is not None and handle.state is SHARDED and copy.versions != handle.versions:
            handle.drop_host_copy()

    def fetch(self, kind: int) -> None:
        """Gather a resident of this unit, which is not where it stays. Collective over the shard axis.

        Precondition: its leaves show the shard.
        """
        handle, root = self.handles[kind], self.root
        if handle.state is SHARDED:  # it is not where a user has asked for the unit, or it stayed after a backward
            self._launch_fetch(handle)
        if handle.state is GATHERING:
            handle.wait_unshard()
        self.note("keep")
        if handle.residence is HOST:
            handle.keep_host_copy()
            root.free(handle)
            assert handle.host_copy is not None
            handle.host_copy.versions = handle.versions

    def _launch_fetch(self, handle: FlatParamHandle) -> None:
        root, dtype = self.root, self.dtype_of(handle)
        if root.limiter.held:
            root.limiter.make_room(handle.buffer(dtype), ahead=False)
        if handle.host_copy is not None and handle.host_copy.dtype == dtype:
            handle.launch_upload(root.lanes.unshard)
            root.limiter.note_upload()
        else:
            handle.launch_unshard(self.gather, root.lanes.unshard, dtype=dtype)

    def evict(self, kind: int) -> None:
        """Free what stays of a resident, at once unless a backward is to read it: then it is no resident any more."""
        handle, shown = self.handles[kind], self.shown[kind]
        handle.drop_host_copy()
        if handle.residence is DEVICE and handle.state is UNSHARDED:
            if shown.exposure is SHARD:
                self.root.free(handle)
            else:
                handle.residence = None

    def evict_all(self) -> None:
        """Free what stays of all residents; the next forward gathers it."""
        for kind in range(len(self.handles)):
            self.evict(kind)

    def _dtype_gathered(self, handle: FlatParamHandle) -> torch.dtype:
        if handle.portion is not None and _torch.in_backward():
            return handle.portion.dtype
        return self.dtype_of(handle)

    def dtype_of(self, handle: FlatParamHandle) -> torch.dtype:
        """In which dtype the unit computes with the handle's parameters now."""
        if not self.mixed_precision.full_precision_in_eval:
            return handle.precision.compute
        return handle.precision.master if self.root.in_full_precision(self) else handle.precision.compute

    def _is_out_of_date(self, handle: FlatParamHandle) -> bool:
        """Whether what was kept unsharded is not what a gather would bring: the shard was written to since, or the
        dtype is that of evaluation, and this is training."""
        return handle.is_stale or handle.unsharded.dtype != self.dtype_of(handle)


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
