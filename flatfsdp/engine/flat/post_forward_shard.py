"""What a rank keeps of unsharded parameters between forward and backward, so that the backward gathers them nearby.

[Note: portions] With `reshard_after_forward=n` the unsharded parameter is cut again after a forward, into n *portions*
that n consecutive ranks of the shard axis, *neighbours*, keep in the compute dtype. The backward's all-gather then
stays among neighbours, on one host say. It costs a copy of the portion, since the unsharded buffer can neither be given
back in part nor stay another ([Note: one storage]); the gather itself reads the portion where it lies. Only a backward
reads portions: they hold what the forward computed with, and a forward computes with what the shards hold.
"""

from __future__ import annotations

import torch

from ..comm.transport import Transport
from ..device.memory import FlatBuffer, MemoryTracker
from ..device.streams import PendingWork, Stream
from ..layout.layout import FlatLayout


class PostForwardShard:
    """One rank's portion of one flat parameter.

    Attributes:
        dtype: the compute dtype of the forward that it was kept of.
    """

    def __init__(
        self, unsharded: torch.Tensor, layout: FlatLayout, transport: Transport, *, tracker: MemoryTracker
    ) -> None:
        """Copy this rank's portion of `unsharded`, 1-D and padded, laid out by `layout`."""
        group = transport.group
        span = layout.over(group.size).shard(group.rank)
        self.dtype = unsharded.dtype
        self._transport = transport
        self._memory = FlatBuffer(span.numel, unsharded.dtype, unsharded.device, tracker=tracker, kind="portion")
        self._memory.allocate()
        self._memory.tensor.copy_(unsharded[span.slice])

    def gather(self, unsharded: torch.Tensor, stream: Stream) -> PendingWork:
        """Fill `unsharded`, which the portion was copied of, with the neighbours' portions. Collective over the
        neighbours.

        Precondition: `stream` comes after the last use of `unsharded`, hence after that copy. [Note: limiter]
        """
        return self._transport.all_gather_base(unsharded, self._memory.tensor, stream)

    def free(self) -> None:
        """Give the memory back; a gather must have been waited for."""
        self._memory.free()
