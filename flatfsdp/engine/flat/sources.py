"""Sources of a flat parameter's unsharded form: the shards, and what else is kept between uses."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from ..comm.tensor_groups import TensorGroup
from ..comm.transport import Transport
from ..device.memory import FlatBuffer
from ..device.streams import PendingWork, Stream
from ..layout.layout import FlatLayout


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
        layout: the positions of the parameters in it, or of the tensors gathered for them.
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
    """A source with memory of its own, in addition to the shard.

    Attributes:
        copy: the unsharded parameter itself, if it stays between iterations.
    """

    copy: torch.Tensor | None = None

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
        """`pieces`: of the shard, one for each segment; if `copies`, a single one is first copied to its position in
        the unsharded buffer."""
        self.dtype = dtype
        self.transport = transport
        self.reads_host = offload
        self._only = pieces[0]
        if not copies or len(pieces) > 1:  # several are copied and cast during the gather
            self.pieces = pieces

    def fill(self, unsharded: UnshardedParam, stream: Stream) -> PendingWork:
        """Copy the only piece to its position, and gather from there."""
        segment, start = unsharded.segments[0], self.transport.group.rank * self._only.numel()
        with stream.running():
            own = segment[start : start + self._only.numel()].copy_(self._only, non_blocking=True)
        return self.transport.all_gather_base(segment, own, stream)
