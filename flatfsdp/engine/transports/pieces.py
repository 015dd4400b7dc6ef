"""Lists of tensors that are communicated as one, each split into one piece per rank.

[Note: pieces of ranks] Coalesced collectives take lists of unsharded 1-D tensors of one dtype, each with the same
number of elements for every rank. A rank's *pieces*, one of each tensor, are addressed as if they were concatenated;
shards and the results of reductions have this order. A single tensor is treated as a list of one.

[Note: scattered] For a small parameter, a call takes longer than copying its bytes. So consecutive tensors of a list
that share a storage are grouped: an *index* into that storage has their positions, in units of the largest size in
bytes that divides all starts and sizes, and one call copies them all. Units are copied bitwise, in a dtype of their
size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ..base import _torch
from ..comm.process_group_transport import copy, copy_unless_there
from ..comm.tensor_groups import TensorGroup

FEWEST = 4  # tensors of a group, at least
LARGEST = 16 * 1024  # bytes of a grouped tensor, at most
_UNITS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class RankPieces:
    """One rank's pieces of the tensors of a list, addressed like one contiguous tensor. [Note: pieces of ranks]

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
        """The elements from `start` to `end` (or to the end, if that is smaller), as slices of the pieces."""
        if start == 0 and end >= self.numel:
            return self.pieces
        slices, first = [], 0
        for piece, size in zip(self.pieces, self.sizes, strict=True):
            low, high = max(start - first, 0), min(end - first, size)
            if low < high:
                slices.append(piece[low:high])
            first += size
        return slices

    def contiguous(self, start: int, end: int) -> torch.Tensor:
        """The elements from `start` to `end` as one tensor: a copy, unless they are in one piece."""
        slices = self.within(start, end) or [self.pieces[0][:0]]
        if len(slices) == 1:
            return slices[0]
        made = slices[0].new_empty(min(end, self.numel) - start)
        self.copy_to(made, start)
        return made

    def of(self, memory: torch.Tensor) -> RankPieces:
        """`memory`, 1-D with as many elements, split like these pieces."""
        return _Contiguous(memory, self)

    # -- copies ------------------------------------------------------------------------------------------------------

    @cached_property
    def scattered(self) -> Scattered | None:
        """The pieces, prepared for copies by few calls, if possible. Precondition: their storages are allocated."""
        return scattered(self.pieces) if self.memory is None else None

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        """Fill the pieces from as many tensors, of any dtype and device; a source that is its piece is not copied."""
        if self.scattered is None:
            copy_unless_there(self.pieces, sources)
        else:
            left = self.scattered.fill(sources)
            copy_unless_there([self.pieces[number] for number in left], [sources[number] for number in left])

    def copy_to(self, memory: torch.Tensor, start: int) -> None:
        """Copy the elements from `start` on to `memory`, 1-D and of this dtype, until it is full."""
        if (found := self._as_whole(memory)) is not None:
            found.copy_to(memory)
        else:
            slices = self.within(start, start + memory.numel())
            copy(cut(memory, slices), slices)

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
            slices = self.within(start, start + memory.numel())
            copy(slices, cut(memory, slices))

    def _as_whole(self, memory: torch.Tensor) -> Scattered | None:
        """`scattered`, if `memory` is for all pieces and suitably aligned; None otherwise."""
        found = self.scattered if memory.numel() == self.numel else None
        return found if found is not None and found.fits(memory) else None


class _Contiguous(RankPieces):
    """Pieces that are contiguous in memory."""

    def __init__(self, memory: torch.Tensor, like: RankPieces) -> None:
        self.memory, self.sizes, self.numel, self.dtype = memory, like.sizes, like.numel, memory.dtype


def pieces_of_ranks(tensors: Sequence[torch.Tensor], world: int) -> list[RankPieces]:
    """The pieces of each rank."""
    if len(tensors) == 1:
        return [RankPieces([piece]) for piece in tensors[0].chunk(world)]
    return [RankPieces(pieces) for pieces in zip(*(tensor.chunk(world) for tensor in tensors), strict=True)]


def cut(memory: torch.Tensor, slices: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """`memory`, 1-D, split into the sizes of `slices`, which have as many elements in total."""
    return [memory] if len(slices) == 1 else memory.split([each.numel() for each in slices])


def add_up(output: torch.Tensor, terms: Sequence[torch.Tensor], rank: int) -> None:
    """Write the sum of `terms`, one per rank, in rank order, to `output`, which may be the term of this `rank`."""
    if terms[rank].data_ptr() == output.data_ptr() and rank > 1:  # must not be overwritten before it is added
        before = torch.add(terms[0], terms[1])
        for term in terms[2:rank]:
            before.add_(term)
        torch.add(before, terms[rank], out=output)
        later = terms[rank + 1 :]
    else:
        torch.add(terms[0], terms[1], out=output)
        later = terms[2:]
    for term in later:
        output.add_(term)


# --- copies by few calls ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Together:
    """A group of tensors that is copied by one call.

    Attributes:
        numbers: their indices in the list.
        storage: the storage that they share, in units; index: their units in it.
        position: the index of the group among the blocks.
    """

    numbers: range
    storage: torch.Tensor
    index: torch.Tensor
    position: int


class Scattered:
    """1-D tensors of one dtype on the CPU, some of which are copied in groups. [Note: scattered]

    A copy of all of them consists of *blocks*: one per group, and one for each of the other tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], runs: Sequence[range]) -> None:
        """`runs`: the indices of each group, in order."""
        itemsize = tensors[0].dtype.itemsize
        starts, sizes = [each.storage_offset() * itemsize for each in tensors], [each.nbytes for each in tensors]
        self._unit = unit = math.gcd(16, *starts, *sizes)  # bytes
        self._dtype = tensors[0].dtype
        self._together: list[_Together] = []
        self._alone: list[int] = []  # indices of ungrouped tensors
        self._positions: list[int] = []  # of ungrouped tensors, among the blocks
        self._sizes: list[int] = []  # of blocks, in units
        end = 0
        for run in (*runs, range(len(tensors), len(tensors))):
            for number in range(end, run.start):
                self._alone.append(number)
                self._positions.append(len(self._sizes))
                self._sizes.append(sizes[number] // unit)
            if run:
                index = _index(unit, (*starts[run.start : run.stop],), (*sizes[run.start : run.stop],))
                storage = _seen(tensors[run.start].untyped_storage(), unit)
                self._together.append(_Together(run, storage, index, len(self._sizes)))
                self._sizes.append(index.numel())
            end = run.stop
        self._singles = [tensors[number].view(_UNITS[unit]) for number in self._alone]
        self._given: list[int] = []
        self._kept: Sequence[torch.Tensor] = ()
        self._joined: list[torch.Tensor | None] = []
        self._unfilled: list[int] = []

    def fits(self, memory: torch.Tensor) -> bool:
        """Whether `memory`, which has as many elements as all tensors, is aligned to units."""
        offset = memory.storage_offset() * memory.dtype.itemsize
        return memory.data_ptr() % self._unit == 0 and offset % self._unit == 0

    def copy_to(self, memory: torch.Tensor) -> None:
        """Copy the tensors into `memory`, which `fits`, back to back."""
        blocks = memory.view(_UNITS[self._unit]).split(self._sizes)
        for each in self._together:
            torch.index_select(each.storage, 0, each.index, out=blocks[each.position])
        if self._singles:
            _torch.foreach_copy_([blocks[position] for position in self._positions], self._singles)

    def copy_given_to(self, memory: torch.Tensor) -> None:
        """`copy_to` right after `fill`: copies from the sources where these are contiguous, which needs no index."""
        blocks = memory.view(_UNITS[self._unit]).split(self._sizes)
        targets, sources = [blocks[position] for position in self._positions], [*self._singles]
        for each, source in zip(self._together, self._joined, strict=True):
            if source is None:
                torch.index_select(each.storage, 0, each.index, out=blocks[each.position])
            else:
                targets.append(blocks[each.position])
                sources.append(source)
        if sources:
            _torch.foreach_copy_(targets, sources)

    def copy_from(self, memory: torch.Tensor) -> None:
        """Fill the tensors from `memory`, which `fits` and has their values back to back."""
        blocks = memory.view(_UNITS[self._unit]).split(self._sizes)
        for each in self._together:
            each.storage.index_copy_(0, each.index, blocks[each.position])
        if self._singles:
            _torch.foreach_copy_(self._singles, [blocks[position] for position in self._positions])

    def fill(self, sources: Sequence[torch.Tensor]) -> Sequence[int]:
        """Fill the groups whose `sources` (one per tensor) are contiguous; returns the indices of all other tensors.

        `sources` are kept alive until the next call with other sources.
        """
        together = self._together
        if sources is self._kept and isinstance(sources, TensorGroup):
            given = self._given
        else:
            given, self._kept = list(map(id, sources)), sources
        if given != self._given:
            self._given = given
            self._joined = [self._as_one(each, sources[each.numbers.start : each.numbers.stop]) for each in together]
            pairs = zip(together, self._joined, strict=True)
            self._unfilled = [*self._alone, *(n for each, source in pairs if source is None for n in each.numbers)]
        for each, source in zip(self._together, self._joined, strict=True):
            if source is not None:
                each.storage.index_copy_(0, each.index, source)
        return self._unfilled

    def _as_one(self, target: _Together, sources: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """`sources` as one tensor in units, if they are contiguous and in another storage than `target`."""
        first = sources[0]
        if first.dtype != self._dtype or len(_runs(sources, fewest=1, largest=LARGEST)) != 1:
            return None
        start, end = first.storage_offset(), first.storage_offset()
        for each in sources:
            if each.storage_offset() != end:
                return None
            end += each.numel()
        storage, itemsize = first.untyped_storage(), first.dtype.itemsize
        if start * itemsize % self._unit or storage.data_ptr() == target.storage.data_ptr():
            return None
        return _seen(storage, self._unit)[start * itemsize // self._unit : end * itemsize // self._unit]


def scattered(tensors: Sequence[torch.Tensor]) -> Scattered | None:
    """`tensors`, 1-D and of one dtype, prepared for copies if some can be grouped. Their storages are allocated."""
    found = _runs(tensors, fewest=FEWEST, largest=LARGEST)
    return Scattered(tensors, found) if found else None


def _runs(tensors: Sequence[torch.Tensor], *, fewest: int, largest: int) -> list[range]:
    """The runs of at least `fewest` consecutive tensors of at most `largest` bytes in one storage of the CPU."""

    def storage_of(number: int) -> int:
        each = tensors[number]
        fits = type(each) is torch.Tensor and each.is_cpu and each.is_contiguous() and 0 < each.nbytes <= largest
        return each.untyped_storage().data_ptr() if fits else 0

    groups: Iterator[tuple[int, Iterator[int]]] = itertools.groupby(range(len(tensors)), storage_of)
    found = [(storage, list(numbers)) for storage, numbers in groups]
    return [range(run[0], run[-1] + 1) for storage, run in found if storage and len(run) >= fewest]


def _seen(storage: torch.UntypedStorage, unit: int) -> torch.Tensor:
    """A complete storage as a tensor of units; the storage need not be allocated."""
    with torch.inference_mode(False):  # used in training, even if first requested in inference mode
        made = torch.empty(0, dtype=_UNITS[unit], device="cpu")  # not the default device
        # The stubs of torch lack the overload for untyped storages.
        return made.set_(storage, 0, (storage.nbytes() // unit,))  # type: ignore[call-overload]


@lru_cache(1024)  # layers have the same layout, in different storages
def _index(unit: int, starts: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """The indices, in units, of tensors that begin at `starts` and have `sizes` (both in bytes)."""
    with torch.inference_mode(False):
        first, length = (torch.tensor(each, device="cpu") // unit for each in (starts, sizes))
        shift = first - length.cumsum(0) + length
        return torch.arange(int(length.sum()), device="cpu") + shift.repeat_interleave(length)
