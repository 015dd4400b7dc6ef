"""Lists of tensors that are communicated as one, each split into one piece per rank.

[Note: rows] Coalesced collectives take lists of unsharded 1-D tensors of one dtype, each with the same number of
elements for every rank. A rank's *row* is the concatenation of its pieces of all tensors; shards and the results of
reductions have this order. A single tensor is treated as a list of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from ..base import _torch
from .scattered import Scattered, scattered


class Row:
    """One rank's pieces of the tensors of a list, addressed like one contiguous tensor. [Note: rows]

    Attributes:
        pieces: 1-D, of one dtype, at least one; sizes: their numbers of elements; numel: the total; dtype: theirs.
        memory: the 1-D tensor that consists of the pieces, if they are known to be contiguous; None otherwise.
    """

    def __init__(self, pieces: Sequence[torch.Tensor]) -> None:
        self.pieces = list(pieces)
        self.sizes = [piece.numel() for piece in self.pieces]
        self.numel, self.dtype = sum(self.sizes), pieces[0].dtype
        self.memory = pieces[0] if len(self.pieces) == 1 else None

    @cached_property
    def pieces(self) -> list[torch.Tensor]:
        """The pieces, as views of `memory`."""
        assert self.memory is not None
        return list(self.memory.split(self.sizes))

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return self.numel * self.dtype.itemsize

    def within(self, start: int, end: int) -> list[torch.Tensor]:
        """The elements from `start` to `end` (or to the row's end, if that is smaller), as slices of the pieces."""
        if start == 0 and end >= self.numel:
            return self.pieces
        parts, first = [], 0
        for piece, size in zip(self.pieces, self.sizes, strict=True):
            low, high = max(start - first, 0), min(end - first, size)
            if low < high:
                parts.append(piece[low:high])
            first += size
        return parts

    def of(self, memory: torch.Tensor) -> Row:
        """`memory`, 1-D with as many elements, split like this row."""
        return _RowInPlace(memory, self)

    # -- copies ------------------------------------------------------------------------------------------------------

    @cached_property
    def scattered(self) -> Scattered | None:
        """The pieces, prepared for copies by few calls, if possible. Precondition: their storages are allocated."""
        return scattered(self.pieces) if self.memory is None else None

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        """Fill the pieces from as many tensors, of any dtype and device; a source that is its piece is not copied."""
        if self.scattered is None:
            copy_apart(self.pieces, sources)
        else:
            rest = self.scattered.fill(sources)
            copy_apart([self.pieces[number] for number in rest], [sources[number] for number in rest])

    def copy_to(self, memory: torch.Tensor, start: int) -> None:
        """Copy the elements from `start` on to `memory`, 1-D and of this dtype, until it is full."""
        if (found := self._as_whole(memory)) is not None:
            found.copy_to(memory)
        else:
            parts = self.within(start, start + memory.numel())
            copy(cut(memory, parts), parts)

    def copy_given_to(self, memory: torch.Tensor, start: int) -> None:
        """`copy_to` right after `fill`, while the sources of `fill` are unchanged."""
        if (found := self._as_whole(memory)) is not None:
            found.copy_given_to(memory)
        else:
            self.copy_to(memory, start)

    def copy_from(self, memory: torch.Tensor, start: int) -> None:
        """Fill the elements from `start` on from `memory`, 1-D and of this dtype: as many as it has."""
        if (found := self._as_whole(memory)) is not None:
            found.copy_from(memory)
        else:
            parts = self.within(start, start + memory.numel())
            copy(parts, cut(memory, parts))

    def _as_whole(self, memory: torch.Tensor) -> Scattered | None:
        """`scattered`, if `memory` is for all pieces and suitably aligned; None otherwise."""
        found = self.scattered if memory.numel() == self.numel else None
        return found if found is not None and found.fits(memory) else None


class _RowInPlace(Row):
    """A row whose pieces are contiguous in memory."""

    def __init__(self, memory: torch.Tensor, like: Row) -> None:
        self.memory, self.sizes, self.numel, self.dtype = memory, like.sizes, like.numel, memory.dtype


def rows_of(tensors: Sequence[torch.Tensor], world: int) -> list[Row]:
    """The row of each rank."""
    if len(tensors) == 1:
        return [Row([piece]) for piece in tensors[0].chunk(world)]
    return [Row(pieces) for pieces in zip(*(tensor.chunk(world) for tensor in tensors), strict=True)]


def cut(memory: torch.Tensor, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """`memory`, 1-D, split into the sizes of `parts`, which have as many elements in total."""
    return [memory] if len(parts) == 1 else memory.split([part.numel() for part in parts])


def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Fill each target from its source, which does not overlap it and may have another dtype or device."""
    if len(targets) == 1:
        targets[0].copy_(sources[0], non_blocking=is_ordered(targets[0]))
    elif targets:
        _torch.foreach_copy_(targets, sources, non_blocking=is_ordered(targets[0]))


def copy_apart(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """`copy`, but skip sources that are their targets (same address)."""
    apart = [pair for pair in zip(targets, sources, strict=True) if pair[0].data_ptr() != pair[1].data_ptr()]
    copy([target for target, _ in apart], [source for _, source in apart])


def is_ordered(target: torch.Tensor) -> bool:
    """Whether later reads of `target` are ordered after a non-blocking copy to it."""
    return target.device.type != "cpu"


def add_up(output: torch.Tensor, terms: Sequence[torch.Tensor], rank: int) -> None:
    """Write the sum of `terms`, one per rank, in rank order, to `output`, which may be the term of this `rank`."""
    if terms[rank].data_ptr() == output.data_ptr() and rank > 1:  # must not be overwritten before it is added
        before = torch.add(terms[0], terms[1])
        for term in terms[2:rank]:
            before.add_(term)
        torch.add(before, terms[rank], out=output)
        rest = terms[rank + 1 :]
    else:
        torch.add(terms[0], terms[1], out=output)
        rest = terms[2:]
    for term in rest:
        output.add_(term)
