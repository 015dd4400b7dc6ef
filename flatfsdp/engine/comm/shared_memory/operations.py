"""What a rank writes into its outbox, and reads from those of its peers, for each kind of collective."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch

from ...base.hashing import hash63
from .chunks import Chunk


class Operation(Protocol):
    """What writes and reads the chunks of one collective.

    Attributes:
        tag: a number that is the same on ranks that issue the same collective.
        done: whether all chunks were taken.
    """

    tag: int
    done: bool

    def post(self, chunk: Chunk[Operation], outbox: torch.Tensor) -> None:
        """Write `chunk` into this rank's `outbox`."""

    def take(self, chunk: Chunk[Operation], outboxes: Sequence[torch.Tensor | None]) -> None:
        """Read `chunk` from all others' `outboxes`, by rank."""


class Gather(Operation):
    """Every rank's piece into the slots of all."""

    def __init__(self, slots: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
        self._slots, self._mine = slots, mine
        self.tag, self.done = _tag("gather", slots[0].numel()), False

    def post(self, chunk: Chunk[Operation], outbox: torch.Tensor) -> None:
        part = self._mine[chunk.start : chunk.end]
        outbox[chunk.place : chunk.place + part.numel()].copy_(part)

    def take(self, chunk: Chunk[Operation], outboxes: Sequence[torch.Tensor | None]) -> None:
        for rank, outbox in enumerate(outboxes):
            if outbox is not None:
                part = self._slots[rank][chunk.start : chunk.end]
                part.copy_(outbox[chunk.place : chunk.place + part.numel()])


class Sum(Operation):
    """The sum over ranks of this rank's piece, in rank order, into `output`, which may be that piece itself."""

    def __init__(self, output: torch.Tensor, pieces: Sequence[torch.Tensor], rank: int) -> None:
        self._output, self._pieces, self._rank = output, pieces, rank
        self.tag, self.done = _tag(f"sum of {output.dtype}", pieces[0].numel()), False

    def _part(
        self, outbox: torch.Tensor, chunk: Chunk[Operation], reader: int, writer: int, count: int
    ) -> torch.Tensor:
        """What `writer` has there for `reader`: a row for each rank but the writer."""
        dtype = self._output.dtype
        row = (chunk.end - chunk.start) * dtype.itemsize
        begin = chunk.place + row * (reader if reader < writer else reader - 1)
        return outbox[begin : begin + count * dtype.itemsize].view(dtype)

    def post(self, chunk: Chunk[Operation], outbox: torch.Tensor) -> None:
        for peer, piece in enumerate(self._pieces):
            if peer != self._rank:
                part = piece[chunk.start : chunk.end]
                self._part(outbox, chunk, peer, self._rank, part.numel()).copy_(part)

    def take(self, chunk: Chunk[Operation], outboxes: Sequence[torch.Tensor | None]) -> None:
        own, total = self._pieces[self._rank][chunk.start : chunk.end], self._output[chunk.start : chunk.end]
        parts = [
            own if outbox is None else self._part(outbox, chunk, self._rank, rank, own.numel())
            for rank, outbox in enumerate(outboxes)
        ]
        if own.data_ptr() == total.data_ptr() and self._rank > 1:  # it is not to be written to before its turn
            before = torch.add(parts[0], parts[1])
            for part in parts[2 : self._rank]:
                before.add_(part)
            torch.add(before, own, out=total)
            rest = parts[self._rank + 1 :]
        else:
            torch.add(parts[0], parts[1], out=total)
            rest = parts[2:]
        for part in rest:
            total.add_(part)


class AllToAll(Operation):
    """A row for each other rank, and theirs for this one; uint8, in rank order."""

    def __init__(self, arrived: torch.Tensor, sent: torch.Tensor, rank: int) -> None:
        self._arrived, self._sent, self._rank = arrived, sent, rank
        self.tag, self.done = _tag("all to all", sent.shape[1]), False

    def post(self, chunk: Chunk[Operation], outbox: torch.Tensor) -> None:
        part = self._sent[:, chunk.start : chunk.end]
        outbox[chunk.place : chunk.place + part.numel()].view(part.shape).copy_(part)

    def take(self, chunk: Chunk[Operation], outboxes: Sequence[torch.Tensor | None]) -> None:
        length = chunk.end - chunk.start
        for row, (writer, outbox) in enumerate((r, box) for r, box in enumerate(outboxes) if box is not None):
            begin = chunk.place + length * (self._rank if self._rank < writer else self._rank - 1)
            self._arrived[row, chunk.start : chunk.end].copy_(outbox[begin : begin + length])


@functools.lru_cache(1024)
def _tag(what: str, elements: int) -> int:
    return hash63(f"{what} {elements}")
