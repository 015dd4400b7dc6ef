"""One flat parameter: a layout, this rank's shard, and the unsharded buffer that comes and goes.

[Note: leaves] The user's own `Parameter` objects stay the autograd leaves. A handle swaps what their `.data` shows
(`views.py`): at rest a view of the shard, while the unit computes an N-D view of the unsharded buffer, and nothing
(zero elements) between a forward that resharded and the backward. The `FlatParameter` holds the shard; with
`use_orig_params=False` it is what modules register and optimizers step.

[Note: kinds] One handle holds parameters of one dtype and of one trainability (as it was at construction); packed bytes
have one of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import nn

from ...api import MixedPrecision
from ...errors import InternalError, UsageError
from ..comm.transport import Transport
from ..config.precision import resolve
from ..device.memory import VERSION, FlatBuffer, MemoryTracker, Versions, versions_of
from ..device.streams import PendingWork, Stream, pin
from ..layout.layout import FlatLayout, ParamSpec, Span
from .host_cache import HostCache, ParamPersistence
from .post_forward_shard import PostForwardShard
from .states import GATHERING, SHARD_STEPS, SHARDED, UNSHARDED, refuse_step


class TracksWrites:
    """A parameter of which what is written to `.data` in place is noticed, by version."""

    @property
    def data(self) -> torch.Tensor:
        """As of any parameter, but of one version counter with it."""
        return self.detach()  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


class FlatParameter(TracksWrites, nn.Parameter):
    """The shard of one handle as a parameter, 1-D, in the master dtype.

    The underscored attributes are FSDP1's names for facts of the layout; other programs read them.
    """

    _fsdp_flattened = True
    _handle_ref: weakref.ref[FlatParamHandle] | None = None

    @property
    def _handle(self) -> FlatParamHandle:
        handle = self._handle_ref() if self._handle_ref is not None else None
        if handle is None:
            raise UsageError(
                "this FlatParameter belongs to no FullyShardedDataParallel module any more (a copy, or the model was "
                "deleted); "
                "read the layout from the model's own `_flat_param`"
            )
        return handle

    @property
    def _fqns(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self._handle.layout.params)

    @property
    def _shapes(self) -> tuple[torch.Size, ...]:
        return tuple(torch.Size(spec.shape) for spec in self._handle.layout.params)

    @property
    def _numels(self) -> tuple[int, ...]:
        return tuple(spec.numel for spec in self._handle.layout.params)

    @property
    def _local_shard(self) -> torch.Tensor:
        return self._handle.shard

    @property
    def _unpadded_unsharded_size(self) -> torch.Size:
        return torch.Size((self._handle.layout.numel,))


@dataclass
class UnshardedParam:
    """The whole flat parameter in one dtype: its buffer (None where the shard itself is the whole), the views of it,
    and each leaf with its view."""

    buffer: FlatBuffer | None
    views: list[torch.Tensor] = field(default_factory=list)
    shown: list[tuple[nn.Parameter, torch.Tensor]] = field(default_factory=list)


def dense(leaf: torch.Tensor) -> torch.Tensor:
    """`leaf`'s elements in memory order, 1-D, without a copy; `leaf` must be dense (channels_last is)."""
    if leaf.is_contiguous():
        return leaf.reshape(-1)
    return leaf.as_strided((leaf.numel(),), (1,), leaf.storage_offset())


def spec_of(name: str, leaf: torch.Tensor) -> ParamSpec:
    """The layout's entry for `leaf`, which must be dense; strides that are not row-major are kept."""
    return ParamSpec(name, tuple(leaf.shape), tuple(leaf.stride()))


def full_views(flat: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    """The parameters of `layout` as N-D views of `flat` (1-D, padded or not)."""
    views = []
    for spec, span in zip(layout.params, layout.spans, strict=True):
        piece = flat.narrow(0, span.start, span.numel)
        views.append(piece.view(spec.shape) if spec.stride is None else piece.as_strided(spec.shape, spec.stride))
    return views


class FlatParamHandle:
    """Layout, shard and unsharded buffer of one kind of parameters of a unit; unshard and reshard.

    Attributes:
        name: the unit's name, for messages.
        leaves: the user's parameters, in layout order.
        layout: where each of them lies.
        is_unsharded_at_rest: whether the shard is the whole (an axis of one rank).
        rank: this rank on the shard axis.
        precision: the dtypes ([Note: dtypes]).
        packed: whether elements are no numbers, and stay as they are. [Note: packed bytes]
        shard: shape (layout.shard_numel,), master dtype, on `shard_device`.
        flat_param: the shard as a parameter.
        state: [Note: lifecycle].
        post_forward_shard: what stays here between forward and backward besides the shard, if anything. [Note:
            portions]
        persistence: where the unsharded parameter stays between uses; None if it does not. [Note: residents]
        host_cache: what stays of it on the host, once it was gathered.
        accumulator_was_requested: whether somebody asked for a hidden leaf's node of autograd. [Note: accumulators]
        device: where the unit computes; `shard_device`: where the shard lives (the CPU when offloaded).
    """

    def __init__(
        self,
        leaves: Sequence[nn.Parameter],
        layout: FlatLayout,
        shard: torch.Tensor,
        *,
        rank: int,
        mixed_precision: MixedPrecision,
        device: torch.device,
        offload: bool,
        pin_memory: bool,
        use_orig_params: bool,
        trainable: bool,
        packed: bool,
        tracker: MemoryTracker,
    ) -> None:
        """Take `shard` as this rank's piece of `leaves` laid out by `layout`; use `flatten` to make one from whole
        parameters."""
        self.name = ""
        self.leaves = list(leaves)
        self.layout = layout
        self.is_unsharded_at_rest = layout.world == 1
        self.rank = rank
        self.mixed_precision = MixedPrecision() if packed else mixed_precision
        self.packed = packed
        self.precision = resolve(self.mixed_precision, shard.dtype)
        self.device = device
        self.offload = offload
        self.pin_memory = pin_memory
        self.use_orig_params = use_orig_params
        self.trainable = trainable
        self.tracker = tracker
        self.state = SHARDED
        spans = [layout.span_in_shard(i, rank) for i in range(len(self.leaves))]
        self._pieces = [(span.start, span.numel) for span in spans]
        # Of the leaves that have elements here, or none anywhere: what divides a shard into them, in one call.
        self._present = [i for i, spec in enumerate(layout.params) if spans[i].numel or 0 in spec.shape]
        self._cuts, self._kept = _cuts([spans[i] for i in self._present], layout.shard_numel)
        tracker.add("shard", shard.numel() * shard.element_size())
        self._unsharded: dict[torch.dtype, UnshardedParam] = {}
        self._active: UnshardedParam | None = None
        self._pending: PendingWork | None = None
        self.post_forward_shard: PostForwardShard | None = None
        self.persistence: ParamPersistence | None = None
        self.host_cache: HostCache | None = None
        self.accumulator_was_requested = False
        self._flags: list[bool] = []  # whether leaves require a gradient, when that was asked last
        self._trainable: frozenset[int] = frozenset()
        self.shard = shard
        self.shard_device = shard.device
        self.flat_param = FlatParameter(shard, requires_grad=trainable)
        self.flat_param._handle_ref = weakref.ref(self)
        self.refresh_views()

    @classmethod
    def flatten(
        cls,
        leaves: Sequence[nn.Parameter],
        names: Sequence[str],
        *,
        world: int,
        rank: int,
        mixed_precision: MixedPrecision,
        device: torch.device,
        offload: bool,
        pin_memory: bool,
        use_orig_params: bool,
        packed: bool,
        tracker: MemoryTracker,
    ) -> FlatParamHandle:
        """Lay whole `leaves` (one dtype) out and copy this rank's shard from them. No communication.

        The shard lives on `device`, or on the CPU with `offload`. The leaves still show their own memory.
        """
        for leaf in leaves:
            if not _is_dense(leaf):
                leaf.data = leaf.data.contiguous()
        master = leaves[0].dtype
        compute = master if packed else resolve(mixed_precision, master).compute
        layout = FlatLayout.pack(
            [spec_of(name, leaf) for name, leaf in zip(names, leaves, strict=True)],
            world=world,
            align=max(1, 16 // compute.itemsize) if use_orig_params else 1,
            pad_total=use_orig_params,
        )
        param_ref = torch.device("cpu") if offload else device
        shard = torch.zeros(layout.shard_numel, dtype=master, device=param_ref)
        if offload and pin_memory:
            shard = pin(shard)
        for owned in layout.owned(rank):
            shard[owned.in_shard.slice].copy_(dense(leaves[owned.index].detach())[owned.in_param.slice])
        return cls(
            leaves,
            layout,
            shard,
            rank=rank,
            mixed_precision=mixed_precision,
            device=device,
            offload=offload,
            pin_memory=pin_memory,
            use_orig_params=use_orig_params,
            trainable=any(leaf.requires_grad for leaf in leaves),
            packed=packed,
            tracker=tracker,
        )

    # -- the shard ---------------------------------------------------------------------------------------------------

    def views_of_shard(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """What the leaves show of `flat`, which is laid out like the shard: 1-D pieces, maybe empty (N-D if whole)."""
        if self.is_unsharded_at_rest:
            return full_views(flat, self.layout)
        return [flat.narrow(0, start, numel) for start, numel in self._pieces]

    def pieces_of(self, flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Those of `views_of_shard(flat)` that have elements, or whose parameter has none anywhere, by index.

        They are no views for autograd, and share no version counter.
        """
        if self.is_unsharded_at_rest:
            return enumerate(full_views(flat, self.layout))
        pieces = flat.unsafe_split_with_sizes(self._cuts)
        return zip(self._present, [pieces[k] for k in self._kept], strict=True)

    def refresh_views(self) -> None:
        """Rebuild the views of the shard (it moved or changed its dtype)."""
        self.sharded_views = self.views_of_shard(self.shard)
        self.shown_sharded = list(zip(self.leaves, self.sharded_views, strict=True))
        self._shown_at_rest = self._facts(self.sharded_views)
        self._address = self.shard.data_ptr()
        self.empty = torch.empty(0, dtype=self.precision.compute, device=self.device)
        alike = self.shard.dtype == self.empty.dtype and self.shard.device == self.empty.device
        self.shard_is_alike = alike and not self.is_unsharded_at_rest
        self._unsharded.clear()
        self._shard_version = self._gathered_version = self._writes
        self._versions = Versions(self.leaves)

    def _facts(self, tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[Any], list[torch.dtype]]:
        # What tells that a tensor's memory was replaced; lists, because whole lists are compared at every forward.
        extent = _SHAPE if self.is_unsharded_at_rest else torch.Tensor.numel  # pieces of a shard are 1-D
        return list(map(torch.Tensor.data_ptr, tensors)), list(map(extent, tensors)), list(map(_DTYPE, tensors))

    @property
    def flat_shows_shard(self) -> bool:
        """Whether the flat parameter shows the shard, as it should; not if the user replaced its `.data`."""
        return self.flat_param.data_ptr() == self._address and self.flat_param.dtype == self.shard.dtype

    def replaced_leaves(self) -> list[int]:
        """The leaves that do not show their place in the shard, though they should: the user replaced their `.data`."""
        found = self._facts(self.leaves)
        if found == self._shown_at_rest:
            return []
        return [
            i for i, facts in enumerate(zip(*found, strict=True)) if facts != tuple(f[i] for f in self._shown_at_rest)
        ]

    def replace_shard(self, shard: torch.Tensor) -> None:
        """Take `shard` (same number of elements, maybe another dtype or device) as the new shard; only while
        sharded."""
        if self.state is not SHARDED or shard.shape != self.shard.shape:
            raise InternalError(
                f"{self.name}: a shard of shape {tuple(shard.shape)} replaces {tuple(self.shard.shape)} while "
                f"{self.state.value}"
            )
        self.tracker.remove("shard", self.shard.numel() * self.shard.element_size())
        self.tracker.add("shard", shard.numel() * shard.element_size())
        self.precision = resolve(self.mixed_precision, shard.dtype)
        self.shard_device = shard.device
        if not self.offload:
            self.device = shard.device
        elif self.pin_memory:
            shard = pin(shard)
        self.shard = shard
        self.flat_param.data = shard
        self.refresh_views()

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """FSDP1's name for the master dtype."""
        return self.precision.master

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        # Accelerate assigns it after `flat_param.data`, which the next forward adopts.
        if dtype != self.flat_param.dtype:
            raise UsageError(
                f"_orig_param_dtype of unit {self.name or '<root>'!r}: got {dtype}, but its flat parameter has "
                f"{self.flat_param.dtype}; assign flat_param.data first"
            )

    @property
    def steppable(self) -> list[nn.Parameter]:
        """The parameters that an optimizer sees."""
        return self.leaves if self.use_orig_params else [self.flat_param]

    def move_to_tracker(self, tracker: MemoryTracker) -> None:
        """Count this handle's bytes in `tracker` from now on (the unit joined another root)."""
        count = self.shard.numel() * self.shard.element_size()
        self.tracker.remove("shard", count)
        tracker.add("shard", count)
        self.tracker = tracker
        self._unsharded.clear()

    # -- unshard and reshard -----------------------------------------------------------------------------------------

    def _new_target(self, dtype: torch.dtype) -> UnshardedParam:
        buffer = (
            None
            if self.is_shard_in(dtype)
            else FlatBuffer(self.layout.padded_numel, dtype, self.device, tracker=self.tracker, kind="unsharded")
        )
        made = self._unsharded[dtype] = UnshardedParam(buffer)
        return made

    def launch_unshard(self, transport: Transport, stream: Stream, *, dtype: torch.dtype) -> None:
        """Issue the all-gather in `dtype`. Collective over the shard axis.

        Precondition: sharded. Postcondition: gathering; `wait_unshard` ends it. A portion is dropped.
        """
        flat = self.open_unshard(stream, dtype=dtype)
        if flat is None:
            return
        source = self.shard
        if self.offload or source.dtype != flat.dtype or source.device != flat.device:
            own = flat.narrow(0, self.rank * self.layout.shard_numel, self.layout.shard_numel)
            with stream.running():
                source = own.copy_(source, non_blocking=True)
        self._pending = transport.all_gather_base(flat, source, stream)

    def launch_unshard_post_forward(self, stream: Stream) -> None:
        """Issue the all-gather of portions, in their dtype. Collective over the neighbours. [Note: portions]

        Precondition: sharded, with a portion. Postcondition: gathering; `wait_unshard` ends it and drops the portion.
        """
        assert self.post_forward_shard is not None
        if GATHERING not in SHARD_STEPS[self.state]:
            refuse_step(self.state, GATHERING, SHARD_STEPS, self.name, None)
        self.state = GATHERING
        self._gathered_version = self._writes
        target = self._active = self._unsharded.get(self.post_forward_shard.dtype) or self._new_target(
            self.post_forward_shard.dtype
        )
        assert target.buffer is not None
        with stream.running():
            target.buffer.allocate()
        self._pending = self.post_forward_shard.gather(target.buffer.tensor, stream)

    def keep_post_forward_shard(self, transport: Transport) -> None:
        """Copy this rank's portion out of the unsharded buffer, which is about to be freed. [Note: portions]

        Precondition: unsharded.
        """
        self.post_forward_shard = PostForwardShard(self.unsharded, self.layout, transport, tracker=self.tracker)

    def drop_post_forward_shard(self) -> None:
        """Free the portion, if there is one; it must not be on its way."""
        if self.post_forward_shard is not None:
            self.post_forward_shard.free()
            self.post_forward_shard = None

    def keep_host_cache(self) -> None:
        """Copy the unsharded parameter to the host. [Note: residents] Precondition: unsharded, in memory of its own."""
        self.drop_host_cache()
        self.host_cache = HostCache(self.unsharded, tracker=self.tracker)

    def drop_host_cache(self) -> None:
        """Free the copy on the host, if there is one."""
        if self.host_cache is not None:
            self.host_cache.free()
            self.host_cache = None

    def launch_upload(self, stream: Stream) -> None:
        """Fill the unsharded buffer from the host. No communication.

        Precondition: sharded, with a copy on the host. Postcondition: gathering; `wait_unshard` ends it.
        """
        assert self.host_cache is not None
        flat = self.open_unshard(stream, dtype=self.host_cache.dtype)
        assert flat is not None
        self._pending = self.host_cache.upload(flat, stream)

    def open_unshard(self, stream: Stream, *, dtype: torch.dtype) -> torch.Tensor | None:
        """Take the memory that an all-gather in `dtype` fills: padded and 1-D; None where the shard is the whole.

        Precondition: sharded. Postcondition: gathering; the caller issues the gather. A portion is dropped.
        """
        if self.post_forward_shard is not None:
            self.drop_post_forward_shard()
        if GATHERING not in SHARD_STEPS[self.state]:
            refuse_step(self.state, GATHERING, SHARD_STEPS, self.name, None)
        self.state = GATHERING
        self._gathered_version = self._writes
        target = self._active = self._unsharded.get(dtype) or self._new_target(dtype)
        self._pending = None
        if target.buffer is None:
            return None
        with stream.running():
            target.buffer.allocate()
        return target.buffer.tensor

    def await_unshard(self, pending: PendingWork) -> None:
        """The gather that was opened is `pending`, maybe together with others."""
        self._pending = pending

    def wait_unshard(self) -> None:
        """Order the caller after the gather. Precondition: gathering. Postcondition: unsharded."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if UNSHARDED not in SHARD_STEPS[self.state]:
            refuse_step(self.state, UNSHARDED, SHARD_STEPS, self.name, None)
        self.state = UNSHARDED
        active = self._active or self._refuse_sharded()
        if not active.views:
            active.views = full_views(self.shard if active.buffer is None else active.buffer.tensor, self.layout)
            active.shown = list(zip(self.leaves, active.views, strict=True))
        if active.buffer is not None:
            writes = self._gathered_version
            self._versions.on_fill(changed=writes != self._shard_version)
        else:
            writes = self._writes
            if writes != self._shard_version:
                # The leaves see the write, made through the flat parameter, without having been told.
                torch.autograd.graph.increment_version(self.leaves)
            self._versions.ask()
        if self.post_forward_shard is None:
            self._shard_version = writes
        else:  # which is as old as its forward: what was written to the shard since is not in the buffer
            self.drop_post_forward_shard()

    def reshard(self) -> FlatBuffer | None:
        """Give up the unsharded buffer and return it for the caller to free (None where the shard is the whole).

        Precondition: unsharded. Postcondition: sharded; the caller lets the leaves show something else at once.
        """
        if SHARDED not in SHARD_STEPS[self.state]:
            refuse_step(self.state, SHARDED, SHARD_STEPS, self.name, None)
        self.state = SHARDED
        buffer = (self._active or self._refuse_sharded()).buffer
        if buffer is not None:
            self._versions.on_free()
        self._active = None
        return buffer

    def can_hold(self, dtype: torch.dtype) -> bool:
        """Whether the unsharded buffer is there, and could hold gradients of `dtype` in the parameters' places.

        Where the shard is the whole, the memory of the reduced gradient is that of the slots, and lasts.
        """
        there = self.state is UNSHARDED and not self.is_unsharded_at_rest
        return there and self.unsharded.dtype == dtype

    def overwrite(self, indices: Collection[int]) -> None:
        """The places of these parameters in the unsharded buffer will hold their gradients: nobody may read them any
        more."""
        self._versions.on_overwrite(indices)

    @property
    def unsharded_buffer(self) -> FlatBuffer:
        """The unsharded buffer; only while unsharded, and where it is not the shard."""
        buffer = (self._active or self._refuse_sharded()).buffer
        assert buffer is not None
        return buffer

    @contextmanager
    def to_cpu(self) -> Iterator[torch.Tensor]:
        """A context in which the unsharded flat parameter is on the CPU, 1-D and without padding, and nowhere else.

        Yields it; `flat_param` shows it, too, and the leaves show nothing. What is written to it is kept for as long as
        the parameters stay unsharded. On a CPU it is a copy in memory of its own.

        Raises:
            UsageError: the parameters are sharded, or their shard is the whole.
        """
        if self.state is not UNSHARDED or not self.owns_unsharded:
            raise UsageError(
                f"to_cpu() of unit {self.name or '<root>'!r}: expected unsharded parameters apart from their shard, as "
                "inside its forward; they are "
                f"{'not sharded at all' if self.is_unsharded_at_rest else self.state.value}"
            )
        buffer = (self._active or self._refuse_sharded()).buffer
        assert buffer is not None
        numel = self.layout.numel
        on_cpu = torch.empty(numel, dtype=buffer.tensor.dtype, device="cpu")
        on_cpu.copy_(buffer.tensor[:numel])
        shown = [leaf.data for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.data = self.empty
        self.flat_param.data = on_cpu
        buffer.free()
        try:
            yield on_cpu
        finally:
            buffer.allocate()
            buffer.tensor[:numel].copy_(self.flat_param.detach())
            buffer.tensor[numel:].zero_()
            self.flat_param.data = self.shard
            for leaf, view in zip(self.leaves, shown, strict=True):
                leaf.data = view

    @property
    def unsharded_views(self) -> list[torch.Tensor]:
        """The parameters as N-D views of the unsharded buffer; only while unsharded."""
        return (self._active or self._refuse_sharded()).views

    @property
    def shown_unsharded(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Each leaf with its view of the unsharded buffer; only while unsharded."""
        return (self._active or self._refuse_sharded()).shown

    @property
    def unsharded(self) -> torch.Tensor:
        """The unsharded flat parameter, 1-D and padded; only while unsharded."""
        active = self._active or self._refuse_sharded()
        return self.shard if active.buffer is None else active.buffer.tensor

    def buffer(self, dtype: torch.dtype) -> FlatBuffer | None:
        """The buffer for `dtype`, allocated or not (None where the shard is the whole, or before the first use)."""
        known = self._unsharded.get(dtype)
        return known.buffer if known is not None else None

    @property
    def owns_unsharded(self) -> bool:
        """Whether the unsharded parameter has memory of its own (and does not share the shard's)."""
        return self._active is not None and self._active.buffer is not None

    def is_shard_in(self, dtype: torch.dtype) -> bool:
        """Whether the shard itself is the unsharded parameter of that dtype, which takes no memory then."""
        return self.is_unsharded_at_rest and dtype == self.shard.dtype and not self.offload

    @property
    def unsharded_bytes(self) -> int:
        """What the unsharded parameter takes, at most: in evaluation it may be of the master dtype."""
        sizes = [self.precision.compute.itemsize]
        if self.mixed_precision.full_precision_in_eval:
            sizes.append(self.precision.master.itemsize)
        return self.layout.padded_numel * max(sizes)

    @property
    def is_frozen(self) -> bool:
        """Whether none of the parameters requires a gradient, as users have set it."""
        if not self.use_orig_params:
            return not self.flat_param.requires_grad
        return not any([leaf.requires_grad for leaf in self.leaves])

    def trainable_indices(self) -> frozenset[int]:
        """Which of the leaves require a gradient now."""
        flags = list(map(_REQUIRES_GRAD, self.leaves))
        if flags != self._flags:  # a set is slow to make, and they seldom change
            self._flags = flags
            self._trainable = frozenset(i for i, flag in enumerate(flags) if flag)
        return self._trainable

    @property
    def _writes(self) -> int:
        # Either may be written to, and after a replacement of the shard they no longer share one counter.
        return self.shard._version + self.flat_param._version

    @property
    def versions(self) -> tuple[int, ...]:
        """Changes with every write to the shard, through whatever shows it."""
        return self._writes, *versions_of(self.leaves)

    @property
    def is_stale(self) -> bool:
        """Whether the shard was written to since the unsharded buffer was filled."""
        writes = self.shard._version + self.flat_param._version
        return writes != self._shard_version or list(map(VERSION, self.leaves)) != self._versions.known

    @property
    def was_written_since_gathered(self) -> bool:
        """Whether the shard was written to since the last gather of it was issued."""
        return self._writes != self._gathered_version

    @property
    def was_edited(self) -> bool:
        """Whether a leaf was written to in place since the unsharded buffer was filled."""
        return list(map(VERSION, self.leaves)) != self._versions.known

    @property
    def shows_unsharded(self) -> bool:
        """Whether the leaves show their places in the unsharded buffer; not if a user replaced a `.data`. Only while
        unsharded."""
        views = (self._active or self._refuse_sharded()).views
        return list(map(torch.Tensor.data_ptr, self.leaves)) == list(map(torch.Tensor.data_ptr, views))

    @property
    def edited(self) -> list[str]:
        """The names of the leaves that were."""
        versions = zip(self.layout.params, self.leaves, self._versions.known, strict=True)
        return [spec.name for spec, leaf, seen in versions if leaf._version != seen]

    @property
    def unlike_shard(self) -> list[str]:
        """The names of leaves that show other values than their shards, which are the whole. Only while unsharded.

        Waits for the device.
        """
        if not (self.is_unsharded_at_rest and self.use_orig_params):
            return []
        rows = zip(self.layout.params, self.sharded_views, self.unsharded_views, strict=True)
        return [spec.name for spec, shard, view in rows if not torch.equal(shard.to(view.device, view.dtype), view)]

    def _refuse_sharded(self) -> NoReturn:
        raise InternalError(f"{self.name}: the unsharded parameter was asked for while {self.state.value}")


def _cuts(spans: Sequence[Span], numel: int) -> tuple[list[int], list[int]]:
    """The sizes of pieces that `numel` elements are divided into, and which of them are the `spans`."""
    sizes, kept, end = [], [], 0
    for span in spans:
        if span.numel and span.start > end:
            sizes.append(span.start - end)
        kept.append(len(sizes))
        sizes.append(span.numel)
        end = span.stop if span.numel else end
    return [*sizes, numel - end], kept


_SHAPE, _DTYPE, _REQUIRES_GRAD = attrgetter("shape"), attrgetter("dtype"), attrgetter("requires_grad")


def _is_dense(leaf: torch.Tensor) -> bool:
    """Whether the elements of `leaf` fill their memory exactly once."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(leaf.stride(), leaf.shape, strict=True) if n > 1):
        if stride != expected:
            return leaf.numel() == 0
        expected *= size
    return True
