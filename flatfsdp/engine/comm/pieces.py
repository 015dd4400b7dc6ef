"""Lists of tensors that travel as one, cut into a piece for each rank.

[Note: rows] Collectives that take lists take unsharded tensors of one dtype, 1-D, each of which has room for as many
elements of every rank. Together they are one space, in which a rank's *row* is its piece of each, one behind the
other; that is the order of a shard, and of what a reduction leaves. A single tensor is a list of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from ..base import _torch
from .scattered import Scattered, scattered


class Row:
    """What one rank has of each tensor of a list, as if it lay in one place. [Note: rows]

    Attributes:
        pieces: 1-D, of one dtype, one at least; sizes: their elements; numel: of all; dtype: theirs.
        memory: where they are known to lie one behind the other; None elsewhere.
    """

    def __init__(self, pieces: Sequence[torch.Tensor]) -> None:
        self.pieces = list(pieces)
        self.sizes = [piece.numel() for piece in self.pieces]
        self.numel, self.dtype = sum(self.sizes), pieces[0].dtype
        self.memory = pieces[0] if len(self.pieces) == 1 else None

    @cached_property
    def pieces(self) -> list[torch.Tensor]:
        """The tensors."""
        assert self.memory is not None
        return list(self.memory.split(self.sizes))

    @property
    def parts(self) -> list[torch.Tensor]:
        """The pieces that have elements."""
        return [piece for piece, size in zip(self.pieces, self.sizes, strict=True) if size]

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return self.numel * self.dtype.itemsize

    def within(self, start: int, end: int) -> list[torch.Tensor]:
        """What lies between the elements `start` and `end`, where there are so many, in parts of pieces."""
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
        """`memory`, 1-D and of as many elements, cut as this row is."""
        return _RowInPlace(memory, self)

    # -- copies ------------------------------------------------------------------------------------------------------

    @cached_property
    def scattered(self) -> Scattered | None:
        """The pieces as what can be copied by few calls, if they can. Precondition: they have memory."""
        return scattered(self.pieces) if self.memory is None else None

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        """Fill the pieces from as many tensors, of any dtype and anywhere; those that lie in them already stay."""
        if self.scattered is None:
            copy_apart(self.pieces, sources)
        else:
            rest = self.scattered.fill(sources)
            copy_apart([self.pieces[number] for number in rest], [sources[number] for number in rest])

    def copy_to(self, memory: torch.Tensor, start: int) -> None:
        """Copy elements from `start` on to `memory`, 1-D and of this dtype: as many as it has."""
        if (found := self._as_whole(memory)) is not None:
            found.copy_to(memory)
        else:
            parts = self.within(start, start + memory.numel())
            copy(cut(memory, parts), parts)

    def copy_given_to(self, memory: torch.Tensor, start: int) -> None:
        """`copy_to` right after `fill`, before anybody writes to what that was given."""
        if (found := self._as_whole(memory)) is not None:
            found.copy_given_to(memory)
        else:
            self.copy_to(memory, start)

    def copy_from(self, memory: torch.Tensor, start: int) -> None:
        """Fill elements from `start` on from `memory`, 1-D and of this dtype: as many as it has."""
        if (found := self._as_whole(memory)) is not None:
            found.copy_from(memory)
        else:
            parts = self.within(start, start + memory.numel())
            copy(parts, cut(memory, parts))

    def _as_whole(self, memory: torch.Tensor) -> Scattered | None:
        """What copies all pieces to or from `memory`, if that is for all, and it does."""
        found = self.scattered if memory.numel() == self.numel else None
        return found if found is not None and found.fits(memory) else None


class _RowInPlace(Row):
    """Pieces that lie one behind the other."""

    def __init__(self, memory: torch.Tensor, like: Row) -> None:
        self.memory, self.sizes, self.numel, self.dtype = memory, like.sizes, like.numel, memory.dtype


def rows_of(tensors: Sequence[torch.Tensor], world: int) -> list[Row]:
    """The row of each rank."""
    if len(tensors) == 1:
        return [Row([piece]) for piece in tensors[0].chunk(world)]
    return [Row(pieces) for pieces in zip(*(tensor.chunk(world) for tensor in tensors), strict=True)]


def cut(memory: torch.Tensor, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """`memory`, 1-D, cut as `parts` are, which have as many elements together."""
    return [memory] if len(parts) == 1 else memory.split([part.numel() for part in parts])


def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Fill each target from its source, which lies elsewhere, and may have another dtype or be on another device."""
    if len(targets) == 1:
        targets[0].copy_(sources[0], non_blocking=is_ordered(targets[0]))
    elif targets:
        _torch.foreach_copy_(targets, sources, non_blocking=is_ordered(targets[0]))


def copy_apart(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """`copy` of those that do not lie in their targets already."""
    apart = [pair for pair in zip(targets, sources, strict=True) if pair[0].data_ptr() != pair[1].data_ptr()]
    copy([target for target, _ in apart], [source for _, source in apart])


def is_ordered(target: torch.Tensor) -> bool:
    """Whether what reads it is in order behind a copy that the host does not wait for."""
    return target.device.type != "cpu"


def add(first: Row, second: Row, output: Row) -> None:
    """The sum of two rows, which may be the output's."""
    for one, other, total in zip(first.pieces, second.pieces, output.pieces, strict=True):
        torch.add(one, other, out=total)
