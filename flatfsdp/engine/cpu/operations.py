"""Writing and reading the chunks of each kind of collective in the outboxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..base import _torch
from ..transports.pieces import Row, add_up, cut
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
    """An all-gather into the rows of all ranks, of which this rank's is filled. [Note: rows]

    Attributes:
        just_filled: whether this rank's row was just filled, and its sources are unchanged since.
    """

    def __init__(self, rows: Sequence[Row], rank: int, *, just_filled: bool) -> None:
        self._rows, self._rank, self.just_filled = rows, rank, just_filled
        self.done = False

    def post(self, chunk: Chunk[Operation], outbox: torch.Tensor) -> None:
        row = self._rows[self._rank]
        copy = row.copy_given_to if self.just_filled else row.copy_to
        copy(_place(outbox, chunk.place, row, chunk), chunk.start)

    def take(self, chunk: Chunk[Operation], outboxes: Sequence[torch.Tensor | None]) -> None:
        for row, outbox in zip(self._rows, outboxes, strict=True):
            if outbox is not None:
                row.copy_from(_place(outbox, chunk.place, row, chunk), chunk.start)


class Sum(Operation):
    """The sum over ranks of this rank's row, in rank order, into `output`, which may be that row itself."""

    def __init__(self, output: Row, rows: Sequence[Row], rank: int) -> None:
        self._output, self._rows, self._rank = output, rows, rank
        self.done = False

    def _begin(self, chunk: Chunk[Operation], reader: int, writer: int) -> int:
        """The offset of the piece for `reader` in the outbox of `writer`, which has one for each other rank."""
        each = (chunk.end - chunk.start) * self._output.dtype.itemsize
        return chunk.place + each * (reader if reader < writer else reader - 1)

    def post(self, chunk: Chunk[Operation], outbox: torch.Tensor) -> None:
        for peer, row in enumerate(self._rows):
            if peer != self._rank:
                row.copy_to(_place(outbox, self._begin(chunk, peer, self._rank), row, chunk), chunk.start)

    def take(self, chunk: Chunk[Operation], outboxes: Sequence[torch.Tensor | None]) -> None:
        own, output, rank = self._rows[self._rank], self._output, self._rank
        arrived = [
            None if outbox is None else _place(outbox, self._begin(chunk, rank, writer), own, chunk)
            for writer, outbox in enumerate(outboxes)
        ]
        if output.memory is not None and own.scattered is not None and chunk.is_all_of(own.numel):
            _add_scattered(output.memory, arrived, own, rank)
            return
        parts, total = (row.within(chunk.start, chunk.end) for row in (own, output))
        of_ranks = [parts if each is None else cut(each, parts) for each in arrived]
        for one, *terms in zip(total, *of_ranks, strict=True):
            add_up(one, terms, rank)


class AllToAll(Operation):
    """An all-to-all: one row to each other rank, and one from each; uint8, in rank order."""

    def __init__(self, arrived: torch.Tensor, sent: torch.Tensor, rank: int) -> None:
        self._arrived, self._sent, self._rank = arrived, sent, rank
        self.done = False

    def post(self, chunk: Chunk[Operation], outbox: torch.Tensor) -> None:
        part = self._sent[:, chunk.start : chunk.end]
        outbox[chunk.place : chunk.place + part.numel()].view(part.shape).copy_(part)

    def take(self, chunk: Chunk[Operation], outboxes: Sequence[torch.Tensor | None]) -> None:
        length = chunk.end - chunk.start
        for row, (writer, outbox) in enumerate((r, box) for r, box in enumerate(outboxes) if box is not None):
            begin = chunk.place + length * (self._rank if self._rank < writer else self._rank - 1)
            self._arrived[row, chunk.start : chunk.end].copy_(outbox[begin : begin + length])


def _place(outbox: torch.Tensor, begin: int, row: Row, chunk: Chunk[Operation]) -> torch.Tensor:
    """The view of an outbox, from byte `begin` on, for the elements of `row` in `chunk`; `row` may end earlier."""
    numel = max(0, min(chunk.end, row.numel) - chunk.start)
    return outbox[begin : begin + numel * row.dtype.itemsize].view(row.dtype)


def _add_scattered(total: torch.Tensor, arrived: Sequence[torch.Tensor | None], own: Row, rank: int) -> None:
    """Write the sum of the `arrived` rows and of this rank's `own` row, in rank order, to `total`."""
    before, after = ([each for each in part if each is not None] for part in (arrived[:rank], arrived[rank + 1 :]))
    if rank < 2:
        own.copy_to(total, 0)
        add_up(total, [*before, total, *after], rank)
    else:
        add_up(total, before, 0)
        _torch.foreach_add_(total.split(own.sizes), own.pieces)
        for each in after:
            total.add_(each)
