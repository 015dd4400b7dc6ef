"""Collectives whose numbers travel as blocks of few bits, over any transport. [Note: blocks]

[Note: quantization] Each hop quantizes once, and a rank's own part stays out of it where no other rank has that.

- *Gather*: a rank encodes its shard, straight from the master dtype, into its row of a buffer of bytes, which the
  transport below gathers as it gathers anything. All rows are decoded when they have arrived, this rank's too: every
  rank computes with the same values.
- *Reduce-scatter*: a rank encodes the pieces of the others, which go all-to-all, and adds up what it decodes, in rank
  order, in float32, its own piece as it is.
- *All-reduce*: the same for a piece for each rank, whose sum is encoded once more and gathered.

Bytes are counted as they travel, with the scales (`CommStats`), and rows of bytes in the memory tracker as `quantized`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..device.fake_tensors import is_memoryless
from ..device.memory import FlatBuffer
from ..device.streams import PendingWork, Stream
from .block_codec import BlockCodec
from .transport import ProcessGroupTransport, Transport

KIND = "quantized"  # of bytes


class QuantizedTransport(ProcessGroupTransport):
    """Another transport's gathers of parameters, in few bits. [Note: quantization]"""

    casts_shards = True

    def __init__(self, inner: Transport, codec: BlockCodec) -> None:
        """`inner`: over several ranks; what is not overridden here is done as there, in full precision."""
        super().__init__(inner.group, inner.device, comm_stats=inner.comm_stats, tracker=inner.tracker)
        self._inner = inner
        self._codec = codec

    def all_gather_base(self, output: torch.Tensor, shard: torch.Tensor, stream: Stream) -> PendingWork:
        """Fill `output` with what is decoded of every rank's `shard`, which may have another dtype and be on the host.
        Collective."""
        return self.all_gather_coalesced([output], [shard], stream)

    def all_gather_coalesced(
        self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`all_gather_base` of several, as one operation. Collective."""
        world, rank = self.group.size, self.group.rank
        wholes = [_real(output).view(world, -1) for output in outputs]
        sizes = [self._codec.row_bytes(whole.shape[1]) for whole in wholes]
        with stream.running():
            buffer = self._bytes(world * sum(sizes))
            rows = buffer.tensor.view(world, -1)
            for shard, row in zip(shards, rows[rank : rank + 1].split(sizes, dim=1), strict=True):
                self._encode(_real(shard).unsqueeze(0), row)
        arriving = self._inner.all_gather_base(buffer.tensor, rows[rank], stream)

        def unpack() -> None:
            for whole, part in zip(wholes, rows.split(sizes, dim=1), strict=True):
                self._compute(whole.numel(), self._codec.decode_into, whole, part)
            buffer.free()

        if stream.is_callers:
            return PendingWork(work=arriving, keep=tuple(outputs), finish=unpack)
        with stream.running():
            arriving.wait()
            unpack()
            return PendingWork(device=self.device, event=stream.mark(), keep=tuple(outputs))

    def _encode(self, values: torch.Tensor, rows: torch.Tensor) -> None:
        self._compute(values.numel(), self._codec.encode, values, rows)

    def _compute(self, numel: int, function: Callable[..., None], *args: object) -> None:
        """Run a function of the codec, whose scratch is counted. [Note: dry run]"""
        free = self.tracker.allocate(KIND, self._codec.scratch_bytes(numel, self.device.device))
        if not is_memoryless():
            with torch.no_grad():
                function(*args)
        free()

    def _bytes(self, count: int) -> FlatBuffer:
        """Memory for so many bytes, until it is freed."""
        buffer = FlatBuffer(count, torch.uint8, self.device.device, tracker=self.tracker, kind=KIND)
        buffer.allocate()
        return buffer


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, 1-D, as real numbers: twice as many of a complex one."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
