"""Copies between many small tensors and one contiguous tensor, by few calls.

[Note: scattered] For a small parameter, a call takes longer than copying its bytes. So consecutive tensors of a list
that share a storage are grouped: an *index* into that storage has their places, in units of the largest size in bytes
that divides all starts and sizes, and one call copies them all. Units are copied bitwise, in a dtype of their size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..base import _torch
from .tensor_groups import TensorGroup

FEWEST = 4  # tensors of a group, at least
LARGEST = 16 * 1024  # bytes of a grouped tensor, at most
_UNITS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True, eq=False)
class _Together:
    """A group of tensors that is copied by one call.

    Attributes:
        numbers: their indices in the list.
        storage: the storage that they share, in units; index: their units in it.
        place: the index of the group among the parts.
    """

    numbers: range
    storage: torch.Tensor
    index: torch.Tensor
    place: int


class Scattered:
    """1-D tensors of one dtype on the CPU, some of which are copied in groups. [Note: scattered]

    A copy of all of them consists of *parts*: one per group, and one for each of the other tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], runs: Sequence[range]) -> None:
        """`runs`: the indices of each group, in order."""
        itemsize = tensors[0].dtype.itemsize
        starts, sizes = [each.storage_offset() * itemsize for each in tensors], [each.nbytes for each in tensors]
        self._unit = unit = math.gcd(16, *starts, *sizes)  # bytes
        self._dtype = tensors[0].dtype
        self._together: list[_Together] = []
        self._alone: list[int] = []  # indices of ungrouped tensors
        self._places: list[int] = []  # of ungrouped tensors, among the parts
        self._sizes: list[int] = []  # of parts, in units
        end = 0
        for run in (*runs, range(len(tensors), len(tensors))):
            for number in range(end, run.start):
                self._alone.append(number)
                self._places.append(len(self._sizes))
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
        self._apart: list[int] = []

    def fits(self, memory: torch.Tensor) -> bool:
        """Whether `memory`, which has as many elements as all tensors, is aligned to units."""
        offset = memory.storage_offset() * memory.dtype.itemsize
        return memory.data_ptr() % self._unit == 0 and offset % self._unit == 0

    def copy_to(self, memory: torch.Tensor) -> None:
        """Copy the tensors into `memory`, which `fits`, back to back."""
        parts = memory.view(_UNITS[self._unit]).split(self._sizes)
        for each in self._together:
            torch.index_select(each.storage, 0, each.index, out=parts[each.place])
        if self._singles:
            _torch.foreach_copy_([parts[place] for place in self._places], self._singles)

    def copy_given_to(self, memory: torch.Tensor) -> None:
        """`copy_to` right after `fill`: copies from the sources where these are contiguous, which needs no index."""
        parts = memory.view(_UNITS[self._unit]).split(self._sizes)
        targets, sources = [parts[place] for place in self._places], [*self._singles]
        for each, source in zip(self._together, self._joined, strict=True):
            if source is None:
                torch.index_select(each.storage, 0, each.index, out=parts[each.place])
            else:
                targets.append(parts[each.place])
                sources.append(source)
        if sources:
            _torch.foreach_copy_(targets, sources)

    def copy_from(self, memory: torch.Tensor) -> None:
        """Fill the tensors from `memory`, which `fits` and has their values back to back."""
        parts = memory.view(_UNITS[self._unit]).split(self._sizes)
        for each in self._together:
            each.storage.index_copy_(0, each.index, parts[each.place])
        if self._singles:
            _torch.foreach_copy_(self._singles, [parts[place] for place in self._places])

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
            self._apart = [*self._alone, *(n for each, source in pairs if source is None for n in each.numbers)]
        for each, source in zip(self._together, self._joined, strict=True):
            if source is not None:
                each.storage.index_copy_(0, each.index, source)
        return self._apart

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
