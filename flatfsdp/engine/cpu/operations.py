"""Writing and reading the chunks of each kind of collective in the outboxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..base import _torch
from ..comm.sum_tree import Block
from ..transports.block_sums import RankBlocks
from ..transports.pieces import RankPieces, add_up, cut
from .chunks import Chunk


class Operation(Protocol):
    """The interface of one collective, which writes and reads its chunks.

    Attributes:
        done: whether all of its chunks were taken.
    """

    done: bool

    def post(self, chunk: Chunk[Operation], outbox: torch.Tensor) -> None:
        """Write `chunk` into this rank's `outbox`."""

    def take(self, chunk: Chunk[Operation], outboxes: Sequence[torch.Tensor | None]) -> None:
        """Read `chunk` from the `outboxes` of all other ranks (indexed by rank; this rank's is None)."""


class Gather(Operation):
    """An all-gather into the pieces of all ranks, of which this rank's are filled. [Note: pieces of ranks]

    Attributes:
        just_filled: whether this rank's pieces were just filled, and their sources are unchanged since.
    """

    def __init__(self, of_ranks: Sequence[RankPieces], rank: int, *, just_filled: bool) -> None:
        self._of_ranks, self._rank, self.just_filled = of_ranks, rank, just_filled
        self.done = False

    def post(self, chunk: Chunk[Operation], outbox: torch.Tensor) -> None:
        pieces = self._of_ranks[self._rank]
        copy = pieces.copy_given_to if self.just_filled else pieces.copy_to
        copy(_view(outbox, chunk.offset, pieces, chunk), chunk.start)

    def take(self, chunk: Chunk[Operation], outboxes: Sequence[torch.Tensor | None]) -> None:
        for pieces, outbox in zip(self._of_ranks, outboxes, strict=True):
            if outbox is not None:
                pieces.copy_from(_view(outbox, chunk.offset, pieces, chunk), chunk.start)


class Sum(Operation):
    """The sum over ranks of this rank's pieces, in rank order, into `output`, which may be those pieces themselves."""

    def __init__(self, output: RankPieces, of_ranks: Sequence[RankPieces], rank: int) -> None:
        self._output, self._of_ranks, self._rank = output, of_ranks, rank
        self.done = False

    def _begin(self, chunk: Chunk[Operation], reader: int, writer: int) -> int:
        """The offset of the piece for `reader` in the outbox of `writer`, which has one for each other rank."""
        each = (chunk.end - chunk.start) * self._output.dtype.itemsize
        return chunk.offset + each * (reader if reader < writer else reader - 1)

    def post(self, chunk: Chunk[Operation], outbox: torch.Tensor) -> None:
        for peer, pieces in enumerate(self._of_ranks):
            if peer != self._rank:
                pieces.copy_to(_view(outbox, self._begin(chunk, peer, self._rank), pieces, chunk), chunk.start)

    def take(self, chunk: Chunk[Operation], outboxes: Sequence[torch.Tensor | None]) -> None:
        own, output, rank = self._of_ranks[self._rank], self._output, self._rank
        arrived = [
            None if outbox is None else _view(outbox, self._begin(chunk, rank, writer), own, chunk)
            for writer, outbox in enumerate(outboxes)
        ]
        if output.memory is not None and own.scattered is not None and chunk.is_all_of(own.numel):
            _add_scattered(output.memory, arrived, own, rank)
            return
        slices, total = (pieces.within(chunk.start, chunk.end) for pieces in (own, output))
        terms_of = [slices if each is None else cut(each, slices) for each in arrived]
        for one, *terms in zip(total, *terms_of, strict=True):
            add_up(one, terms, rank)


class BlockSum(Operation):
    """The sums of blocks of microbatches over ranks, of this rank's pieces. [Note: tree of microbatches]"""

    def __init__(self, own: RankBlocks) -> None:
        self._own = own
        self.done = False

    def _begin(self, chunk: Chunk[Operation], reader: int, writer: int, number: int) -> int:
        """The offset of a block's piece for `reader` in the outbox of `writer`."""
        each = (chunk.end - chunk.start) * self._own.outputs[0].itemsize
        return chunk.offset + each * ((reader if reader < writer else reader - 1) * self._own.exchange.most + number)

    def post(self, chunk: Chunk[Operation], outbox: torch.Tensor) -> None:
        own = self._own
        for number, of_ranks in enumerate(own.blocks):
            for peer, pieces in enumerate(of_ranks):
                if peer != own.rank:
                    target = _view(outbox, self._begin(chunk, peer, own.rank, number), pieces, chunk)
                    pieces.copy_to(target, chunk.start)

    def take(self, chunk: Chunk[Operation], outboxes: Sequence[torch.Tensor | None]) -> None:
        own, dtype = self._own, self._own.outputs[0].dtype
        size = own.outputs[0][chunk.start : chunk.end].nbytes
        arrived: dict[Block, torch.Tensor] = {}
        for writer, (sent, outbox) in enumerate(zip(own.exchange.of_ranks, outboxes, strict=True)):
            for number, block in enumerate(sent if outbox is not None else ()):
                begin = self._begin(chunk, own.rank, writer, number)
                arrived[block] = outbox[begin : begin + size].view(dtype)  # type: ignore[index]
        own.add_up(arrived, chunk.start, chunk.end)


class AllToAll(Operation):
    """An all-to-all: one row to each other rank, and one from each; uint8, in rank order."""

    def __init__(self, arrived: torch.Tensor, sent: torch.Tensor, rank: int) -> None:
        self._arrived, self._sent, self._rank = arrived, sent, rank
        self.done = False

    def post(self, chunk: Chunk[Operation], outbox: torch.Tensor) -> None:
        sent = self._sent[:, chunk.start : chunk.end]
        outbox[chunk.offset : chunk.offset + sent.numel()].view(sent.shape).copy_(sent)

    def take(self, chunk: Chunk[Operation], outboxes: Sequence[torch.Tensor | None]) -> None:
        length = chunk.end - chunk.start
        for row, (writer, outbox) in enumerate((r, box) for r, box in enumerate(outboxes) if box is not None):
            begin = chunk.offset + length * (self._rank if self._rank < writer else self._rank - 1)
            self._arrived[row, chunk.start : chunk.end].copy_(outbox[begin : begin + length])


def _view(outbox: torch.Tensor, begin: int, pieces: RankPieces, chunk: Chunk[Operation]) -> torch.Tensor:
    """The view of an outbox, from byte `begin` on, for the elements of `pieces` in `chunk`; these may end earlier."""
    numel = max(0, min(chunk.end, pieces.numel) - chunk.start)
    return outbox[begin : begin + numel * pieces.dtype.itemsize].view(pieces.dtype)


def _add_scattered(total: torch.Tensor, arrived: Sequence[torch.Tensor | None], own: RankPieces, rank: int) -> None:
    """Write the sum of the `arrived` pieces and of this rank's `own`, in rank order, to `total`."""
    before, after = ([each for each in those if each is not None] for those in (arrived[:rank], arrived[rank + 1 :]))
    if rank < 2:
        own.copy_to(total, 0)
        add_up(total, [*before, total, *after], rank)
    else:
        add_up(total, before, 0)
        _torch.foreach_add_(total.split(own.sizes), own.pieces)
        for each in after:
            total.add_(each)
