"""Sources of a flat parameter's unsharded form: the shards, pieces kept by neighboring ranks, or host memory.

[Note: post-forward shards] With `reshard_after_forward=n` the unsharded parameter is split again after a forward, into
n pieces that n consecutive ranks of the shard axis, the *post-forward axis*, keep in the compute dtype. The backward's
all-gather then stays on that axis, inside one host for example. It costs a copy of the piece, since the unsharded
buffer can neither be given back in part nor stay another ([Note: one storage]); the gather itself reads the piece in
place. Only a backward reads such pieces: they hold the values that the forward computed with, while a forward computes
with the values of the shards.

[Note: persistent parameters] A flat parameter that no optimizer steps need not be gathered for every use. A
*persistent* one was gathered once, and stays unsharded on the device, or as a copy in host memory from which the device
is filled again: this costs memory, or the transfer from the host, instead of a collective. Whether a handle is
persistent, and whether it must be gathered, is decided where a forward begins, and is part of the facts that ranks
compare there, so that no rank skips a gather alone. A persistent parameter that was written to is gathered again.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from ..base import _torch
from ..comm.tensor_groups import TensorGroup
from ..comm.transport import Transport
from ..device.memory import FlatBuffer, MemoryTracker
from ..device.streams import PendingWork, Stream, pinned_like
from ..layout.layout import FlatLayout
from .layout_views import own_pieces_of, pieces_of


class ParamPersistence(enum.Enum):
    """Where a persistent parameter stays between uses."""

    DEVICE = "device"
    HOST = "host"


DEVICE, HOST = ParamPersistence


@dataclass(eq=False)
class UnshardedParam:
    """The unsharded flat parameter in one dtype.

    Attributes:
        flat: 1-D and padded.
        buffer: its memory; None if it is the shard itself.
        layout: the places of the parameters in it, or of the tensors gathered for them.
        segments: the parts of it that are gathered, since it first had memory. [Note: pieces]
        views: the parameters as N-D views of it, once it was filled; shown: each leaf with its view.
        source: the shard as its source; filled_from: the source of the last fill.
        has_inner: whether other memory in addition to `flat` is freed with it (`inner_addresses`).
    """

    has_inner: ClassVar[bool] = False

    flat: torch.Tensor
    buffer: FlatBuffer | None
    layout: FlatLayout
    segments: TensorGroup = field(default_factory=TensorGroup)
    views: list[torch.Tensor] = field(default_factory=list)
    shown: list[tuple[nn.Parameter, torch.Tensor]] = field(default_factory=list)
    source: ShardSource | None = None
    filled_from: UnshardSource | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which modules compute with it."""
        return self.flat.dtype

    def inner_addresses(self) -> list[int]:
        """The addresses of other memory that is freed with it, in addition to `flat`."""
        return []


class UnshardSource:
    """Fills an unsharded buffer.

    Attributes:
        dtype: of the values that it provides.
        is_local: whether a fill takes no communication.
        reads_host: whether the device reads host memory that the host writes to between iterations.
        pieces: this rank's part of each segment, which `transport` gathers; if there are none, `fill` is called.
        as_of_forward: whether it provides, once, the values of the last forward instead of the shards' current ones.
        versions: those of the handle between uses when the source was made; if they differ, it is stale. None if that
            does not matter.
    """

    dtype: torch.dtype
    is_local: bool = False
    reads_host: bool = False
    pieces: Sequence[torch.Tensor] = ()
    transport: Transport
    as_of_forward: bool = False
    versions: tuple[int, ...] | None = None

    def fill(self, unsharded: UnshardedParam, stream: Stream) -> PendingWork:
        """Start to fill `unsharded`, which has its memory, on `stream`. Collective unless it is local."""
        raise NotImplementedError


class KeptSource(UnshardSource):
    """A source with memory of its own, in addition to the shard."""

    def serves(self, dtype: torch.dtype) -> bool:
        """Whether the unsharded parameter may come from this source now, if the unit computes in `dtype`."""
        raise NotImplementedError

    def free(self) -> None:
        """Free the memory; fills from it must have been waited for, or be ordered before on the device."""
        raise NotImplementedError


class ShardSource(UnshardSource):
    """This rank's shard, gathered with those of other ranks over the shard axis."""

    def __init__(
        self, pieces: list[torch.Tensor], dtype: torch.dtype, transport: Transport, *, copies: bool, offload: bool
    ) -> None:
        """`pieces`: of the shard, one for each segment; if `copies`, a single one is first copied to its place in the
        unsharded buffer."""
        self.dtype = dtype
        self.transport = transport
        self.reads_host = offload
        self._only = pieces[0]
        if not copies or len(pieces) > 1:  # several are copied and cast during the gather
            self.pieces = pieces

    def fill(self, unsharded: UnshardedParam, stream: Stream) -> PendingWork:
        """Copy the only piece to its place, and gather from there."""
        segment, start = unsharded.segments[0], self.transport.group.rank * self._only.numel()
        with stream.running():
            own = segment[start : start + self._only.numel()].copy_(self._only, non_blocking=True)
        return self.transport.all_gather_base(segment, own, stream)


class PostForwardShard(KeptSource):
    """One rank's piece of the unsharded parameter left by a forward. [Note: post-forward shards]

    Attributes:
        dtype: the compute dtype of that forward.
    """

    as_of_forward = True

    def __init__(self, unsharded: UnshardedParam, transport: Transport, *, tracker: MemoryTracker) -> None:
        """Copy this rank's piece of `unsharded`."""
        group, flat = transport.group, unsharded.flat
        over = unsharded.layout.over(group.size)
        self.dtype = unsharded.dtype
        self._memory = FlatBuffer(over.shard_numel, flat.dtype, flat.device, tracker=tracker, kind="post_forward_shard")
        self._memory.allocate()
        # A gather comes after the last use of `unsharded`, hence after the copy. [Note: limiter]
        self.transport, self.pieces = transport, pieces_of(self._memory.tensor, over)
        for piece, own in zip(self.pieces, own_pieces_of(flat, over, group.rank), strict=True):
            piece.copy_(own)

    def serves(self, dtype: torch.dtype) -> bool:
        """True in a backward, which computes in the dtype of its forward."""
        return _torch.in_backward()

    def free(self) -> None:
        self._memory.free()


class HostCache(KeptSource):
    """The unsharded parameter in host memory, page-locked if there is an accelerator. [Note: persistent parameters]"""

    is_local = reads_host = True

    def __init__(self, unsharded: UnshardedParam, *, tracker: MemoryTracker) -> None:
        """The host waits until `unsharded` is copied."""
        flat = unsharded.flat.detach()
        self._tensor = pinned_like(flat)
        self._tensor.copy_(flat)
        self._free = tracker.allocate("host copy", flat.nbytes)
        self.dtype = unsharded.dtype  # the compute dtype when it was made
        self.versions = ()

    def serves(self, dtype: torch.dtype) -> bool:
        return dtype == self.dtype

    def fill(self, unsharded: UnshardedParam, stream: Stream) -> PendingWork:
        return stream.upload(unsharded.flat, self._tensor)

    def free(self) -> None:
        self._free()
