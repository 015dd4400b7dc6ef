"""One flat parameter: a layout, this rank's shard, and the unsharded buffer that comes and goes.

[Note: leaves] A handle's leaves are the tensors in which autograd accumulates gradients: parameters of constant shape,
which show the unsharded buffer while the unit computes, and refuse to be used while that has no memory (`views.py`).
What users hold, and optimizers step on, are the holders of its face, always this rank's shard. With an `OriginalFace`
the user's own parameters are both; with others the leaves are private, or the parameters from which a flat or a
distributed one was made ([Note: two lives]). The `FlatParameter` holds the shard; with a `FlatFace` modules register it
([Note: faces]).

[Note: kinds] One handle holds parameters of one *kind*: of one dtype and one trainability (as it was at construction);
packed bytes are a kind of their own. In code a kind is the index of its handle in `Unit.handles`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.autograd.graph import increment_version

from ...api import MixedPrecision
from ...errors import InternalError, UsageError, few, label_of
from ..base._torch import as_plain_tensors
from ..comm.transport import Transport
from ..config.precision import Precision, resolve
from ..device.memory import FlatBuffer, MemoryTracker
from ..device.streams import PendingWork, Stream, in_host_memory, pin
from ..layout.layout import FlatLayout, Part
from .faces import REQUIRES_GRAD, Face, FaceMaker
from .layout_views import ShardViews, dense, full_views, segments_of, spec_of, stored_in_order
from .sources import KeptSource, ParamPersistence, ShardSource, UnshardedParam, UnshardSource
from .states import GATHERING, SHARD_STEPS, SHARDED, UNSHARDED, refuse_step
from .write_tracker import VERSION, FlatParameter, WriteTracker, share_counter

# A gradient of at most SMALL_BYTES is collected; at COLLECT_BYTES the collected ones are moved.
SMALL_BYTES = 64 * 1024
COLLECT_BYTES = 1024 * 1024


class _NotUnsharded(UnshardedParam):
    """Stands for the unsharded parameter while there is none: it has no buffer, and raises on any other access."""

    buffer = None

    def __init__(self, handle: FlatParamHandle) -> None:
        self._of = weakref.ref(handle)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or (handle := self._of()) is None:  # Python's own lookup
            raise AttributeError(name)
        raise InternalError(
            f"unit {handle.label}: {name!r} of the unsharded parameters {few(handle.flat_param._fqns)} was read while "
            f"they are {handle.state.value}"
        )


@dataclass(frozen=True)
class FlatParamOptions:
    """The options of a flat parameter, fixed at construction.

    Attributes:
        trainable: whether a parameter required a gradient at construction.
        packed: whether elements are not numbers, and stay unchanged. [Note: packed bytes]
        layout: the name of the way in which ranks split parameters. [Note: pieces]
        plan: makes the layout in place of the face; in it parameters may have another order. Copies do without.
        offload: whether the shard lives on the CPU; pin_memory: in page-locked memory.
        face: makes the form of the parameters that users see at rest.
    """

    mixed_precision: MixedPrecision
    offload: bool
    pin_memory: bool
    face: FaceMaker
    trainable: bool
    packed: bool
    layout: str = "flat"
    plan: Callable[..., FlatLayout] | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "plan": None}  # it may hold functions, which a pickle cannot

    def precision(self, master: torch.dtype) -> Precision:
        """The dtypes for a shard of `master`. [Note: dtypes]"""
        return resolve(self.mixed_precision, master)


def take_off_meta(leaves: Sequence[nn.Parameter], names: Sequence[str], device: torch.device) -> None:
    """Turn `leaves`, which are on the meta device, into parameters without elements on `device`: the same objects.

    Raises:
        UsageError: autograd, or a weak reference, holds one in a way that forbids it.
    """
    for name, leaf in zip(names, leaves, strict=True):
        empty = nn.Parameter(torch.empty(0, dtype=leaf.dtype, device=device), leaf.requires_grad)
        vars(empty).update(vars(leaf))
        empty.__class__ = type(leaf)
        try:
            torch.utils.swap_tensors(leaf, empty)
        except RuntimeError as error:
            raise UsageError(
                f"parameter {name!r} is on the meta device, and something keeps a reference to it (a graph, a weak "
                "reference), so it cannot be given memory later. Build this module on a real device"
            ) from error


class FlatParamHandle:
    """Layout, shard and unsharded buffer of one kind of parameters of a unit; unshard and reshard.

    Attributes:
        name: the unit's name, for messages.
        leaves: [Note: leaves], in layout order.
        layout: where each of them lies.
        is_unsharded_at_rest: whether the shard holds all of every parameter (an axis of one rank).
        rank: this rank on the shard axis.
        precision: the dtypes ([Note: dtypes]).
        shard: shape (layout.shard_numel,), master dtype; on the CPU when offloaded.
        flat_param: the shard as a parameter.
        face: the form of the parameters that users see at rest. [Note: faces]
        at_rest: the views of the shard.
        shard_is_whole: whether the shard itself is the unsharded parameter, in the compute dtype.
        writes: counts writes to the shard and the leaves.
        is_small: whether all gradients of a backward may be collected, and moved together.
        counted: a tensor for each version counter of the leaves. [Note: one counter]
        state: [Note: states].
        unsharded: the unsharded parameter, from the launch of its gather until it is resharded; it has a `buffer` only
            if it does not share the shard's memory.
        kept_source: another source of the unsharded form that stays here between uses, in addition to the shard.
        persistence: where the unsharded parameter stays between uses; None if it does not. [Note: persistent
            parameters]
        device: where the unit computes.
        gathers_elements: whether the elements of the shard are what is gathered, in this order, maybe cast.
    """

    gathers_elements: ClassVar[bool] = True

    def __init__(
        self,
        leaves: Sequence[nn.Parameter],
        layout: FlatLayout,
        shard: torch.Tensor,
        *,
        rank: int,
        device: torch.device,
        options: FlatParamOptions,
        tracker: MemoryTracker,
        flat_param: FlatParameter | None = None,
    ) -> None:
        """Take `shard` as this rank's piece of `leaves` laid out by `layout`; use `flatten` to make one from
        unsharded parameters. `flat_param`: that of a handle which this one replaces."""
        self.name = ""
        self.leaves = list(leaves)
        self.layout = layout
        self.is_unsharded_at_rest = layout.world == 1
        self.rank = rank
        self.options = options
        self.precision = options.precision(shard.dtype)
        self.device = device
        self.tracker = tracker
        self.state = SHARDED
        self._unsharded: dict[torch.dtype, UnshardedParam] = {}
        self._not_unsharded = _NotUnsharded(self)
        self.unsharded: UnshardedParam = self._not_unsharded
        self.pending: PendingWork | None = None
        self.kept_source: KeptSource | None = None
        self.persistence: ParamPersistence | None = None
        self.shard = shard
        self._counted = self.shard_bytes
        tracker.add("shard", self._counted)
        self.flat_param = FlatParameter(shard, requires_grad=options.trainable) if flat_param is None else flat_param
        self.flat_param._handle_ref, self.flat_param._fsdp_flattened = weakref.ref(self), True
        self.face: Face = options.face(self.leaves, self.flat_param, layout, rank)
        self.leaves = list(self.face.leaves)
        itemsize, numels = self.precision.compute.itemsize, [spec.numel for spec in layout.params]
        self.is_small = max(numels) * itemsize <= SMALL_BYTES and sum(numels) * itemsize <= COLLECT_BYTES
        # If the shard is the unsharded parameter, users may write to leaves at any time.
        shares = self.is_small and not self.is_unsharded_at_rest
        self.counted: Sequence[torch.Tensor] = share_counter(self.leaves) if shares else self.leaves
        self._refresh_views()

    @classmethod
    def flatten(
        cls,
        leaves: Sequence[nn.Parameter],
        names: Sequence[str],
        *,
        world: int,
        rank: int,
        device: torch.device,
        options: FlatParamOptions,
        tracker: MemoryTracker,
        parts: Mapping[int, Part] = MappingProxyType({}),
        strides: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    ) -> FlatParamHandle:
        """Lay unsharded `leaves` (one dtype) out and copy this rank's shard from them. No communication.

        The shard lives on `device`, or on the CPU with `offload`. The leaves still show their own memory. Leaves on the
        meta device, all or none, have a shard there, and are without elements on `device` themselves. `parts`: the
        positions of parts in their wholes; `strides`: in memory ([Note: stored order]), others keep theirs; both by
        ids of leaves.
        """
        values = [stored_in_order(leaf.detach(), strides.get(id(leaf))) for leaf in leaves]
        master = leaves[0].dtype
        parted = [parts.get(id(leaf)) for leaf in leaves]
        specs = [spec_of(name, value, part) for name, value, part in zip(names, values, parted, strict=True)]
        align = max(1, 16 // options.precision(master).compute.itemsize)
        layout = (options.plan or options.face.lay_out)(specs, world=world, align=align)
        given = dict(zip(names, zip(leaves, values, strict=True), strict=True))
        names = [spec.name for spec in layout.params]
        leaves, values = map(list, zip(*(given[name] for name in names), strict=True))
        on_meta, home = leaves[0].is_meta, torch.device("cpu") if options.offload else device
        like = torch.empty(0, dtype=master, device=leaves[0].device if on_meta else home)
        with in_host_memory(options.offload):
            shard = tracker.apart(like, layout.shard_numel).zero_()
        if on_meta:
            take_off_meta(leaves, names, device)
        elif options.offload and options.pin_memory:
            shard = pin(shard)
        for owned in () if on_meta else layout.owned(rank):
            shard[owned.in_shard.slice].copy_(dense(values[owned.index])[owned.in_param.slice])
        return cls(leaves, layout, shard, rank=rank, device=device, options=options, tracker=tracker)

    @property
    def label(self) -> str:
        """Its unit in messages."""
        return label_of(self.name)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of this handle that modules may list, or users hold."""
        return [*self.leaves, self.flat_param, *self.face.holders]

    # -- the shard ---------------------------------------------------------------------------------------------------

    def _refresh_views(self) -> None:
        """Rebuild all state that depends on the shard (it moved or changed its dtype)."""
        empty = torch.empty(0, dtype=self.precision.compute, device=self.device)
        self.shard_is_whole = self.is_shard_in(self.precision.compute)
        shown = self.face.views_of_shard(is_whole=self.shard_is_whole)
        self.at_rest = ShardViews(shown, self.layout, self.rank, self.shard, empty)
        self.face.moved(self.at_rest, self.shard)
        self.writes = WriteTracker(self.shard, self.flat_param, self.counted, self.face.counters)
        self._unsharded.clear()

    @property
    def flat_shows_shard(self) -> bool:
        """Whether the flat parameter shows the shard, as it should; False if the user replaced its `.data`."""
        with as_plain_tensors():  # its class makes attributes slow otherwise
            return self.flat_param.data_ptr() == self.shard.data_ptr() and self.flat_param.dtype == self.shard.dtype

    def replace_shard(self, shard: torch.Tensor) -> None:
        """Take `shard` (same number of elements, maybe another dtype or device) as the new shard; only while sharded.
        Parameters show the one before until the caller changes them."""
        if self.state is not SHARDED or shard.shape != self.shard.shape:
            raise InternalError(
                f"unit {self.label}: a shard of shape {tuple(shard.shape)} replaces {tuple(self.shard.shape)} while "
                f"{self.state.value}"
            )
        self.precision = self.options.precision(shard.dtype)
        if not self.options.offload:
            self.device = shard.device
        elif self.options.pin_memory and self.has_memory:
            shard = pin(shard)
        if self.shard.is_meta and not shard.is_meta:
            self.flat_param = FlatParameter(shard, requires_grad=self.options.trainable)
            self.flat_param._handle_ref, self.flat_param._fsdp_flattened = weakref.ref(self), True
        self.shard = shard
        self.tracker.remove("shard", self._counted)
        self._counted = self.shard_bytes
        self.tracker.add("shard", self._counted)
        self._refresh_views()

    @property
    def has_memory(self) -> bool:
        """Whether the shard has the parameters' values. [Note: rows of their class]"""
        return True

    @property
    def shard_bytes(self) -> int:
        """The size of this rank's pieces of the parameters at rest."""
        return self.shard.nbytes

    def changed_by(self, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        """The shard after `change`, a move or a cast, for `replace_shard`; None if that leaves it as it is."""
        before = self.shard.data_ptr()
        changed = change(self.shard)
        # share_memory_() also moves it
        return changed.detach() if changed is not self.shard or changed.data_ptr() != before else None

    def move_to_tracker(self, tracker: MemoryTracker) -> None:
        """Count this handle's bytes in `tracker` from now on (the unit joined another root)."""
        self.tracker.remove("shard", self._counted)
        tracker.add("shard", self._counted)
        self.tracker = tracker
        self._unsharded.clear()

    # -- unshard and reshard -----------------------------------------------------------------------------------------

    def _target(self, dtype: torch.dtype) -> UnshardedParam:
        """The unsharded parameter in `dtype`, its memory allocated or not."""
        made = self._unsharded.get(dtype)
        if made is None:
            if self.is_shard_in(dtype):
                made = UnshardedParam(self.shard, None, self.layout)
            else:
                numel = self.layout.padded_numel
                buffer = FlatBuffer(numel, dtype, self.device, tracker=self.tracker, category="unsharded")
                made = UnshardedParam(buffer.tensor, buffer, self.layout)
            self._unsharded[dtype] = made
        return made

    def shard_source(self, transport: Transport, dtype: torch.dtype) -> UnshardSource:
        """The shard as a source in `dtype`, gathered by `transport`."""
        target = self._unsharded.get(dtype) or self._target(dtype)
        source = target.source
        if source is None or source.transport is not transport:
            offload = self.options.offload
            differs = offload or self.shard.dtype != dtype or self.shard.device != target.flat.device
            copies = differs and not transport.casts_shards
            source = ShardSource(self.at_rest.pieces, dtype, transport, copies=copies, offload=offload)
            target.source = source
        return source

    def keep(self, source: KeptSource) -> None:
        """Use `source` for the unsharded form whenever it can serve."""
        self.drop_kept_source()
        self.kept_source = source

    def drop_kept_source(self) -> None:
        """Free the kept source, if there is one; no gather from it may be in flight."""
        if self.kept_source is not None:
            self.kept_source.free()
            self.kept_source = None

    def drop_stale_source(self) -> None:
        """Free the kept source if it depends on the shard's values and these have changed. Precondition: sharded."""
        kept = self.kept_source
        if kept is not None and kept.versions is not None and kept.versions != self.writes.all:
            self.drop_kept_source()

    def launch_unshard(self, source: UnshardSource, stream: Stream) -> None:
        """Allocate the unsharded memory and launch its fill from `source` on `stream`. Collective unless that is local.

        Precondition: sharded. Postcondition: gathering; `wait_unshard` ends it. An earlier forward's source
        is freed.
        """
        kept = self.kept_source
        if kept is not None and kept is not source and kept.as_of_forward:
            self.drop_kept_source()
        if GATHERING not in SHARD_STEPS[self.state]:
            refuse_step(self.state, GATHERING, SHARD_STEPS, self.label, None)
        self.state = GATHERING
        writes = self.writes
        writes.gathered = self.shard._version + self.flat_param._version
        if writes.counters:  # as `of_shard`, without its call
            with as_plain_tensors():
                writes.gathered += writes.replacements + sum(map(VERSION, writes.counters))
        target = self.unsharded = self._unsharded.get(source.dtype) or self._target(source.dtype)
        target.filled_from = source
        self.pending = None
        if target.buffer is not None:
            if stream.is_stream:
                with stream.running():
                    target.buffer.allocate()
            else:  # saves the calls that a context takes
                target.buffer.allocate()
            if not target.segments:
                target.segments = segments_of(target.flat, target.layout)
            pieces = source.pieces
            if not pieces:
                self.pending = source.fill(target, stream)
            elif len(pieces) == 1:
                self.pending = source.transport.all_gather_base(target.segments[0], pieces[0], stream)
            else:
                self.pending = source.transport.all_gather_coalesced(target.segments, pieces, stream)

    def wait_unshard(self) -> None:
        """Order the caller after the gather. Precondition: gathering. Postcondition: unsharded."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        if UNSHARDED not in SHARD_STEPS[self.state]:
            refuse_step(self.state, UNSHARDED, SHARD_STEPS, self.label, None)
        self.state = UNSHARDED
        active = self.unsharded
        if not active.views:
            active.views = full_views(active.flat, self.layout)
            active.shown = list(zip(self.leaves, active.views, strict=True))
        writes = self.writes
        if active.buffer is None:
            writes.show_shard()
            return
        writes.on_fill(changed=writes.gathered != writes.in_buffer)
        if active.filled_from is not None and active.filled_from.as_of_forward:
            self.drop_kept_source()  # and the buffer lacks later writes to the shard
        else:
            writes.in_buffer = writes.gathered

    def reshard(self) -> FlatBuffer | None:
        """Give up the unsharded buffer and return it for the caller to free (None if it is the shard).

        Precondition: unsharded. Postcondition: sharded; the caller changes the leaves' views at once.
        """
        if SHARDED not in SHARD_STEPS[self.state]:
            refuse_step(self.state, SHARDED, SHARD_STEPS, self.label, None)
        self.state = SHARDED
        buffer = self.unsharded.buffer
        if buffer is not None:  # its memory will be unreadable: saved views of it must be refused
            increment_version(self.counted)
        self.unsharded = self._not_unsharded
        return buffer

    def buffer(self, dtype: torch.dtype) -> FlatBuffer | None:
        """The buffer for `dtype`, allocated or not (None if it is the shard, or before the first use)."""
        known = self._unsharded.get(dtype)
        return known.buffer if known is not None else None

    def is_shard_in(self, dtype: torch.dtype) -> bool:
        """Whether the shard itself is the unsharded parameter of that dtype, which then takes no memory."""
        return self.is_unsharded_at_rest and dtype == self.shard.dtype and not self.options.offload

    @property
    def unsharded_bytes(self) -> int:
        """The maximum size of the unsharded parameter: in evaluation it may be of the master dtype."""
        sizes = [self.precision.compute.itemsize]
        if self.options.mixed_precision.full_precision_in_eval:
            sizes.append(self.precision.master.itemsize)
        return self.layout.padded_numel * max(sizes)

    def trainable_indices(self) -> frozenset[int]:
        """Which of the leaves require a gradient now."""
        return indices_of(self.face.flags or tuple(map(REQUIRES_GRAD, self.leaves)))


@lru_cache(maxsize=4096)  # a set is slow to make, and flags seldom change
def indices_of(flags: tuple[bool, ...]) -> frozenset[int]:
    """The indices of the true ones of `flags`."""
    return frozenset(i for i, flag in enumerate(flags) if flag)
