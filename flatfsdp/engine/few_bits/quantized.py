"""Collectives on numbers that are quantized block-wise to few bits, over any transport. [Note: blocks]

[Note: quantization] Each hop quantizes once; a rank's own piece is not quantized if no other rank receives it.

- *Gather*: a rank encodes its shard, directly from the master dtype, into its row of a buffer of bytes, which the
  underlying transport gathers. Then those of all ranks are decoded, including this rank's own: every rank computes
  with the same values.
- *Reduce-scatter*: a rank encodes the pieces of the other ranks, which are exchanged by an all-to-all. Each rank adds
  up the decoded pieces in rank order, in float32; its own piece is added unquantized.
- *All-reduce*: the same for one piece per rank; the sum is encoded again and sent to all ranks, which decode the same
  values. Gradients that are reduced together share blocks.

`CommStats` counts the encoded bytes, including the scales; the memory tracker counts them as `quantized`.

[Note: error feedback] Each rank keeps a *residual* for every number that it quantizes: the sum of the exact values so
far, minus the sum of the values that were sent. It adds the residual before it quantizes the number again, so the error
of the sum over many steps is no larger than that of one step. The method is that of 1-bit SGD (Seide et al. 2014),
analyzed as EF-SGD (Karimireddy et al. 2019); both hops use it, as in 1-bit Adam (Tang et al. 2021). For a flat
parameter with shards of n numbers, a rank holds

- along a shard axis of S ranks `(S - 1) * n` residuals, of the pieces that it sends to the others: the cost is nearly
  the memory of an unsharded gradient;
- along a replicate axis n residuals, of the pieces that it sends; those for its own piece belong to the
  sum, which it sends to all.

Both are in the reduce dtype, and on the device even with `cpu_offload`. The delivered values and the residuals of all
ranks add up to the sum of all gradients, regardless of how the residuals are distributed over ranks. So units may be
joined with different units from step to step.

The residuals count gradients that are dropped after a reduction as sent. Therefore residuals are set to zero after
a failed backward, and when a loss scale decreases, which means that a step was skipped. Residuals have the units of the
communicated gradients: before the mean is taken, and multiplied by the loss scale.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...api import MixedPrecision
from ..base import _torch
from ..base.overrides import is_memoryless
from ..comm.axes import ProcessGroups
from ..comm.process_group_transport import real
from ..comm.transport import Encoding, Reducer
from ..device.memory import FlatBuffer, MemoryTracker
from ..device.streams import DONE, PendingWork, Stream
from ..transports.staged import StagedTransport, followed
from .block_codec import BlockCodec, codecs

QUANTIZED, RESIDUAL = "quantized", "residual"  # of bytes
SHARD, REPLICATE = "shard", "replicate"  # axes of residuals


class QuantizedTransport(StagedTransport):
    """Another transport's gathers of parameters, or reductions of gradients, in few bits. [Note: quantization]"""

    casts_shards = True
    _residuals: Sequence[Residuals] = ()  # of the gradients to reduce; none without error feedback

    def __init__(self, inner: StagedTransport, codec: BlockCodec) -> None:
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
        sizes = [self._codec.encoded_bytes(whole.shape[1]) for whole in wholes]
        with stream.running():
            buffer = self._bytes(world * sum(sizes))
            of_ranks = buffer.tensor.view(world, -1)
            for shard, encoded in zip(shards, of_ranks[rank : rank + 1].split(sizes, dim=1), strict=True):
                self._encode(real(shard).unsqueeze(0), encoded)
        arriving = self._inner.all_gather_base(buffer.tensor, of_ranks[rank], stream)

        def unpack() -> None:
            for whole, encoded in zip(wholes, of_ranks.split(sizes, dim=1), strict=True):
                self._compute(whole.numel(), self._codec.decode_into, whole, encoded)
            buffer.free()

        return followed(arriving, stream, unpack, *outputs)

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        """Sum this rank's piece of `full` and the decoded pieces of the other ranks into `output`. Collective."""
        return self.reduce_scatter_coalesced(output, [full], stream)

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`reduce_scatter_base` of several tensors, whose results are concatenated, as one operation. Collective."""
        world, rank = self.group.size, self.group.rank
        wholes = [_by_rank(real(full), world) for full in fulls]
        sizes = [self._codec.encoded_bytes(whole.shape[1]) for whole in wholes]
        if not any(sizes):
            return DONE
        self.comm_stats.log("reduce_scatter", world * sum(sizes))
        with stream.running():
            sent, arrived = (self._bytes((world - 1) * sum(sizes)) for _ in range(2))
            outgoing, incoming = (buffer.tensor.view(world - 1, -1) for buffer in (sent, arrived))
            owed = [piece for each in self._residuals for piece in each.of_others(fulls[0], world - 1)]
            for index, (whole, encoded) in enumerate(zip(wholes, outgoing.split(sizes, dim=1), strict=True)):
                lost = real(owed[index]) if owed else None
                self._encode(whole[:rank], encoded[:rank], lost[:rank] if lost is not None else None)
                self._encode(whole[rank + 1 :], encoded[rank:], lost[rank:] if lost is not None else None)
        arriving = self._inner.all_to_all(incoming, outgoing, stream)

        def add_up() -> None:
            sent.free()
            pieces = real(output).split([whole.shape[1] for whole in wholes])
            for piece, whole, encoded in zip(pieces, wholes, incoming.split(sizes, dim=1), strict=True):
                self._add_up(piece, encoded, whole[rank])
            arrived.free()

        return followed(arriving, stream, add_up, output, *fulls, *owed)

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork:
        """Sum `tensor` over ranks in place: all ranks decode the same sums. Collective; on a CPU its wait is collective
        as well."""
        world, rank = self.group.size, self.group.rank
        flat = real(tensor.view(-1))
        if not flat.numel():
            return DONE
        piece = -(-flat.numel() // world)
        size = self._codec.encoded_bytes(piece)
        slices = slice(rank * piece), slice(rank * piece, (rank + 1) * piece), slice((rank + 1) * piece, None)
        before, mine, after = (flat[where] for where in slices)
        self.comm_stats.log("all_reduce", world * size)

        def encode(where: slice, encoded: torch.Tensor) -> None:
            pieces = _pieces(flat[where], encoded, piece)
            if not self._residuals:
                for values, one in pieces:
                    self._encode(values, one)
                return
            with joined(self._residuals, tensor) as owed:
                for (values, one), (lost, _) in zip(pieces, _pieces(real(owed)[where], encoded, piece), strict=True):
                    self._encode(values, one, lost)

        with stream.running():
            sent, arrived = (self._bytes((world - 1) * size) for _ in range(2))
            outgoing, incoming = (buffer.tensor.view(world - 1, -1) for buffer in (sent, arrived))
            encode(slices[0], outgoing[:rank])
            encode(slices[2], outgoing[rank:])
        arriving = self._inner.all_to_all(incoming, outgoing, stream)

        def send_sum() -> None:
            self._add_up(mine, incoming, mine)
            encode(slices[1], outgoing[:1])
            outgoing[1:] = outgoing[0]
            self.comm_stats.issued += 1
            self._inner.all_to_all(incoming, outgoing, stream).wait()
            shared = (
                *_pieces(before, incoming[:rank], piece),
                *_pieces(mine, outgoing, piece),
                *_pieces(after, incoming[rank:], piece),
            )
            for values, encoded in shared:
                self._compute(values.numel(), self._codec.decode_into, values, encoded)
            sent.free()
            arrived.free()

        return followed(arriving, stream, send_sum, tensor)

    def compensated(self, residuals: Sequence[Residuals]) -> QuantizedTransport:
        """A copy with these `residuals`, for the reduction of one flat gradient or of several joined ones."""
        made = copy.copy(self)
        made._residuals = residuals
        return made

    def _encode(self, values: torch.Tensor, encoded: torch.Tensor, lost: torch.Tensor | None = None) -> None:
        if values.numel():
            self._compute(values.numel(), self._codec.encode, values, encoded, lost, with_lost=lost is not None)

    def _add_up(self, output: torch.Tensor, encoded: torch.Tensor, own: torch.Tensor) -> None:
        self._compute(own.numel() * len(encoded), self._codec.add_up, output, encoded, own, self.group.rank)

    def _compute(self, numel: int, function: Callable[..., None], *args: object, with_lost: bool = False) -> None:
        """Run a function of the codec and count its scratch memory. [Note: dry run]"""
        scratch = self._codec.scratch_bytes(numel, self.device.device, with_lost=with_lost)
        free = self.tracker.allocate(QUANTIZED, scratch)
        if not is_memoryless():
            with torch.no_grad():
                function(*args)
        free()

    def _bytes(self, count: int) -> FlatBuffer:
        """An allocated buffer of `count` bytes; the caller frees it."""
        buffer = FlatBuffer(count, torch.uint8, self.device.device, tracker=self.tracker, category=QUANTIZED)
        buffer.allocate()
        return buffer


def in_few_bits(mixed: MixedPrecision) -> tuple[Encoding | None, Encoding | None]:
    """The encoding of parameters and that of gradients; None if they are communicated unquantized."""
    parameters, gradients = (_encoding(codec) if codec is not None else None for codec in codecs(mixed))
    return parameters, gradients


@functools.cache  # transports of one encoding are the same object
def _encoding(codec: BlockCodec) -> Encoding:
    return functools.partial(QuantizedTransport, codec=codec)


def _pieces(flat: torch.Tensor, encoded: torch.Tensor, numel: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`flat`, 1-D, in pieces of `numel`, encoded and not: all complete ones, shape (R, numel), then the remainder."""
    whole = flat.numel() // numel
    if whole:
        yield flat[: whole * numel].view(whole, numel), encoded[:whole]
    if flat.numel() > whole * numel:
        yield flat[whole * numel :].unsqueeze(0), encoded[whole : whole + 1]


def _by_rank(flat: torch.Tensor, world: int) -> torch.Tensor:
    """A view of `flat`, shape (world * n,), as (world, n)."""
    return flat.view(world, flat.numel() // world)


# --- error feedback ---------------------------------------------------------------------------------------------------


class Residuals:
    """The residuals of one flat parameter on this rank, by axis; initially zero. [Note: error feedback]"""

    def __init__(self, pieces: Sequence[int], tracker: MemoryTracker) -> None:
        """`pieces`: elements of each piece of a shard."""
        self._pieces = list(pieces)
        self._tracker = tracker
        self._held: dict[str, torch.Tensor] = {}
        self._factors: dict[str, float] = {}  # pending factors of the residuals, applied at their next use

    def of_others(self, like: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        """Residuals along the shard axis, as `along` returns them: for each piece of a shard a tensor of shape (ranks,
        numel of the piece), which belong to the other ranks in order."""
        return list(self.along(SHARD, like, shards=ranks).view(ranks, -1).split(self._pieces, dim=1))

    def along(self, axis: str, like: torch.Tensor, *, shards: int = 1) -> torch.Tensor:
        """Residuals along an axis, shape (shards * shard_numel,), dtype and device of `like`; the tensor is the storage
        itself, to be updated in place. Call it on the stream that uses the residuals."""
        held = self._held.get(axis)
        if held is None or (held.dtype, held.device) != (like.dtype, like.device):
            with torch.inference_mode(False):  # used in training, even if first requested in inference mode
                if held is None:
                    held = torch.zeros(shards * sum(self._pieces), dtype=like.dtype, device=like.device)
                else:  # the module was cast or moved; an overflow in the cast would persist
                    held = held.to(like.device, like.dtype).nan_to_num_(0.0, 0.0, 0.0)
            self._hold(axis, held)
        if (factor := self._factors.pop(axis, 1.0)) != 1.0:
            held.mul_(factor).nan_to_num_(0.0, 0.0, 0.0)
        return held

    def rescale(self, factor: float) -> None:
        """Adapt to gradients that are `factor` times as large from now on; 0 sets all residuals to zero."""
        self._factors = {axis: factor * self._factors.get(axis, 1.0) for axis in self._held}

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """All existing residuals, by axis."""
        return {axis: self.along(axis, held) for axis, held in self._held.items()}

    def load(self, held: Mapping[str, torch.Tensor]) -> None:
        """Replace the residuals by the tensors in `held`, without a copy."""
        self.rescale(0.0)
        for axis, tensor in held.items():
            self._factors.pop(axis, None)
            self._hold(axis, tensor)

    def joining(
        self, inputs: Sequence[Any], scatter: Reducer, replicate: Reducer | None
    ) -> tuple[Reducer, Reducer | None]:
        """The reducers, adding to what they quantize the residuals of all flat parameters whose gradients, `inputs`,
        are reduced together."""
        own = [each.carried for each in inputs if isinstance(each.carried, Residuals)]
        if isinstance(scatter, QuantizedTransport):
            scatter = scatter.compensated(own)
        return scatter, replicate.compensated(own) if isinstance(replicate, QuantizedTransport) else replicate

    def move_to_tracker(self, tracker: MemoryTracker) -> None:
        """Count the bytes in `tracker` from now on."""
        for held in self._held.values():
            self._tracker.remove(RESIDUAL, held.nbytes)
            tracker.add(RESIDUAL, held.nbytes)
        self._tracker = tracker

    def _hold(self, axis: str, tensor: torch.Tensor) -> None:
        if (before := self._held.get(axis)) is not None:
            self._tracker.remove(RESIDUAL, before.nbytes)
        self._tracker.add(RESIDUAL, tensor.nbytes)
        self._held[axis] = tensor


@contextmanager
def joined(residuals: Sequence[Residuals], like: torch.Tensor) -> Iterator[torch.Tensor]:
    """The concatenated residuals of several flat parameters along the replicate axis; changes are written back."""
    each = [own.along(REPLICATE, like) for own in residuals]
    if len(each) == 1:
        yield each[0]
        return
    together = torch.cat(each)
    yield together
    _torch.foreach_copy_(each, list(together.split([own.numel() for own in each])))


def residual_numels(shard_numel: int, groups: ProcessGroups) -> dict[str, int]:
    """The number of residuals that a rank holds for a flat parameter, by axis. [Note: error feedback]"""
    shards = {SHARD: groups.shard.size - 1, REPLICATE: int(groups.replicate is not None)}
    return {axis: count * shard_numel for axis, count in shards.items()}
