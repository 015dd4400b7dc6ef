"""Collectives on numbers that are quantized block-wise to few bits, over any transport. [Note: blocks]

[Note: quantization] Each hop quantizes once; a rank's own part is not quantized if no other rank receives it.

- *Gather*: a rank encodes its shard, directly from the master dtype, into its row of a buffer of bytes, which the
  underlying transport gathers. Then all rows are decoded, including this rank's own: every rank computes with the same
  values.
- *Reduce-scatter*: a rank encodes the pieces of the other ranks, which are exchanged by an all-to-all. Each rank adds
  up the decoded pieces in rank order, in float32; its own piece is added unquantized.
- *All-reduce*: the same for one piece per rank; the sum is encoded again and sent to all ranks, which decode the same
  values. Gradients that are reduced together share blocks.

Reductions store their quantization errors in the residuals that they are given ([Note: error feedback]).

`CommStats` counts the encoded bytes, including the scales; the memory tracker counts the rows of bytes as `quantized`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from ...api import MixedPrecision
from ..comm.error_feedback import Residuals, joined
from ..comm.process_group_transport import ProcessGroupTransport, real
from ..comm.transport import Encoding, Transport
from ..device.fake_tensors import is_memoryless
from ..device.memory import FlatBuffer
from ..device.streams import DONE, PendingWork, Stream
from .block_codec import BlockCodec, codecs

KIND = "quantized"  # of bytes


class QuantizedTransport(ProcessGroupTransport):
    """Another transport's gathers of parameters, or reductions of gradients, in few bits. [Note: quantization]"""

    casts_shards = True
    _residuals: Sequence[Residuals] = ()  # of the gradients to reduce; none without error feedback

    def __init__(self, inner: Transport, codec: BlockCodec) -> None:
        """`inner`: a transport over several ranks; inherited operations run over its group, in full precision."""
        super().__init__(inner.group, inner.device, comm_stats=inner.comm_stats, tracker=inner.tracker)
        self._inner = inner
        self._codec = codec

    def all_gather_base(self, output: torch.Tensor, shard: torch.Tensor, stream: Stream) -> PendingWork:
        """Fill `output` with the decoded shards of all ranks; `shard` may have another dtype and be on the host.
        Collective."""
        return self.all_gather_coalesced([output], [shard], stream)

    def all_gather_coalesced(
        self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`all_gather_base` of several outputs, as one operation. Collective."""
        world, rank = self.group.size, self.group.rank
        wholes = [_by_rank(real(output), world) for output in outputs]
        sizes = [self._codec.row_bytes(whole.shape[1]) for whole in wholes]
        with stream.running():
            buffer = self._bytes(world * sum(sizes))
            rows = buffer.tensor.view(world, -1)
            for shard, row in zip(shards, rows[rank : rank + 1].split(sizes, dim=1), strict=True):
                self._encode(real(shard).unsqueeze(0), row)
        arriving = self._inner.all_gather_base(buffer.tensor, rows[rank], stream)

        def unpack() -> None:
            for whole, part in zip(wholes, rows.split(sizes, dim=1), strict=True):
                self._compute(whole.numel(), self._codec.decode_into, whole, part)
            buffer.free()

        return self._followed(arriving, stream, unpack, *outputs)

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        """Sum this rank's piece of `full` and the decoded pieces of the other ranks into `output`. Collective."""
        return self.reduce_scatter_coalesced(output, [full], stream)

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`reduce_scatter_base` of several tensors, whose results are concatenated, as one operation. Collective."""
        world, rank = self.group.size, self.group.rank
        wholes = [_by_rank(real(full), world) for full in fulls]
        sizes = [self._codec.row_bytes(whole.shape[1]) for whole in wholes]
        if not any(sizes):
            return DONE
        self.comm_stats.log("reduce_scatter", world * sum(sizes))
        with stream.running():
            sent, arrived = (self._bytes((world - 1) * sum(sizes)) for _ in range(2))
            outgoing, incoming = (buffer.tensor.view(world - 1, -1) for buffer in (sent, arrived))
            owed = [piece for each in self._residuals for piece in each.of_others(fulls[0], world - 1)]
            for index, (whole, rows) in enumerate(zip(wholes, outgoing.split(sizes, dim=1), strict=True)):
                lost = real(owed[index]) if owed else None
                self._encode(whole[:rank], rows[:rank], lost[:rank] if lost is not None else None)
                self._encode(whole[rank + 1 :], rows[rank:], lost[rank:] if lost is not None else None)
        arriving = self._inner.all_to_all(incoming, outgoing, stream)

        def add_up() -> None:
            sent.free()
            pieces = real(output).split([whole.shape[1] for whole in wholes])
            for piece, whole, rows in zip(pieces, wholes, incoming.split(sizes, dim=1), strict=True):
                self._add_up(piece, rows, whole[rank])
            arrived.free()

        return self._followed(arriving, stream, add_up, output, *fulls, *owed)

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork:
        """Sum `tensor` over ranks in place: all ranks decode the same sums. Collective; on a CPU its wait is collective
        as well."""
        world, rank = self.group.size, self.group.rank
        flat = real(tensor.view(-1))
        if not flat.numel():
            return DONE
        piece = -(-flat.numel() // world)
        size = self._codec.row_bytes(piece)
        places = slice(rank * piece), slice(rank * piece, (rank + 1) * piece), slice((rank + 1) * piece, None)
        before, mine, after = (flat[place] for place in places)
        self.comm_stats.log("all_reduce", world * size)

        def encode(place: slice, rows: torch.Tensor) -> None:
            pieces = _pieces(flat[place], rows, piece)
            if not self._residuals:
                for values, row in pieces:
                    self._encode(values, row)
                return
            with joined(self._residuals, tensor) as owed:
                for (values, row), (lost, _) in zip(pieces, _pieces(real(owed)[place], rows, piece), strict=True):
                    self._encode(values, row, lost)

        with stream.running():
            sent, arrived = (self._bytes((world - 1) * size) for _ in range(2))
            outgoing, incoming = (buffer.tensor.view(world - 1, -1) for buffer in (sent, arrived))
            encode(places[0], outgoing[:rank])
            encode(places[2], outgoing[rank:])
        arriving = self._inner.all_to_all(incoming, outgoing, stream)

        def share() -> None:
            self._add_up(mine, incoming, mine)
            encode(places[1], outgoing[:1])
            outgoing[1:] = outgoing[0]
            self.comm_stats.issued += 1
            self._inner.all_to_all(incoming, outgoing, stream).wait()
            shared = (
                *_pieces(before, incoming[:rank], piece),
                *_pieces(mine, outgoing, piece),
                *_pieces(after, incoming[rank:], piece),
            )
            for values, rows in shared:
                self._compute(values.numel(), self._codec.decode_into, values, rows)
            sent.free()
            arrived.free()

        return self._followed(arriving, stream, share, tensor)

    def compensated(self, residuals: Sequence[Residuals]) -> QuantizedTransport:
        """A copy with these `residuals`, for the reduction of one flat gradient or of several joined ones."""
        made = copy.copy(self)
        made._residuals = residuals
        return made

    def _encode(self, values: torch.Tensor, rows: torch.Tensor, lost: torch.Tensor | None = None) -> None:
        if values.numel():
            self._compute(values.numel(), self._codec.encode, values, rows, lost, with_lost=lost is not None)

    def _add_up(self, output: torch.Tensor, rows: torch.Tensor, own: torch.Tensor) -> None:
        self._compute(own.numel() * len(rows), self._codec.add_up, output, rows, own, self.group.rank)

    def _compute(self, numel: int, function: Callable[..., None], *args: object, with_lost: bool = False) -> None:
        """Run a function of the codec and count its scratch memory. [Note: dry run]"""
        scratch = self._codec.scratch_bytes(numel, self.device.device, with_lost=with_lost)
        free = self.tracker.allocate(KIND, scratch)
        if not is_memoryless():
            with torch.no_grad():
                function(*args)
        free()

    def _bytes(self, count: int) -> FlatBuffer:
        """An allocated buffer of `count` bytes; the caller frees it."""
        buffer = FlatBuffer(count, torch.uint8, self.device.device, tracker=self.tracker, kind=KIND)
        buffer.allocate()
        return buffer


def in_few_bits(mixed: MixedPrecision) -> tuple[Encoding | None, Encoding | None]:
    """The encoding of parameters and that of gradients; None if they are communicated unquantized."""
    parameters, gradients = (_encoding(codec) if codec is not None else None for codec in codecs(mixed))
    return parameters, gradients


@functools.cache  # transports of one encoding are the same object
def _encoding(codec: BlockCodec) -> Encoding:
    return functools.partial(QuantizedTransport, codec=codec)


def _pieces(flat: torch.Tensor, rows: torch.Tensor, numel: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`flat`, 1-D, in pieces of `numel` with their rows: all complete ones, shape (R, numel), then the remainder."""
    whole = flat.numel() // numel
    if whole:
        yield flat[: whole * numel].view(whole, numel), rows[:whole]
    if flat.numel() > whole * numel:
        yield flat[whole * numel :].unsqueeze(0), rows[whole : whole + 1]


def _by_rank(flat: torch.Tensor, world: int) -> torch.Tensor:
    """A view of `flat`, shape (world * n,), as (world, n)."""
    return flat.view(world, flat.numel() // world)
