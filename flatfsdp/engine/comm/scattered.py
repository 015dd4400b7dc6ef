"""Many small tensors that are copied by few calls, to or from a place where they lie one behind the other.

[Note: scattered] To copy a small parameter takes longer than its bytes do. So neighbors in a list that lie in one
storage are taken together: an *index* of that storage has their places, in units of as many bytes as all starts and
sizes are multiples of, and one call copies them all. Units move as they are, in a dtype of as many bytes.
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

FEWEST = 4  # tensors that are taken together
LARGEST = 16 * 1024  # bytes of one of them
_UNITS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True, eq=False)
class _Together:
    """Tensors that are copied by one call.

    Attributes:
        numbers: which of the list.
        storage: in which they lie, in units; index: where in it.
        place: of what they fill, among the parts.
    """

    numbers: range
    storage: torch.Tensor
    index: torch.Tensor
    place: int


class Scattered:
    """1-D tensors of one dtype on the CPU, some of which are taken together. [Note: scattered]

    Copies of all of them have *parts*: what is taken together, and each of the others.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], runs: Sequence[range]) -> None:
        """`runs`: those that are taken together, in order."""
        itemsize = tensors[0].dtype.itemsize
        starts, sizes = [each.storage_offset() * itemsize for each in tensors], [each.nbytes for each in tensors]
        self._unit = unit = math.gcd(16, *starts, *sizes)  # bytes
        self._dtype = tensors[0].dtype
        self._together: list[_Together] = []
        self._alone: list[int] = []  # the others
        self._places: list[int] = []  # of these, among the parts
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
        """Whether `memory`, which has as many elements as all of them, can be seen in units."""
        offset = memory.storage_offset() * memory.dtype.itemsize
        return memory.data_ptr() % self._unit == 0 and offset % self._unit == 0

    def copy_to(self, memory: torch.Tensor) -> None:
        """Copy them into `memory`, which fits, one behind the other."""
        parts = memory.view(_UNITS[self._unit]).split(self._sizes)
        for each in self._together:
            torch.index_select(each.storage, 0, each.index, out=parts[each.place])
        if self._singles:
            _torch.foreach_copy_([parts[place] for place in self._places], self._singles)

    def copy_given_to(self, memory: torch.Tensor) -> None:
        """`copy_to` right after `fill`: from what the sources have in one place, which takes no index."""
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
        """Fill them from `memory`, which fits, and has what is for them one behind the other."""
        parts = memory.view(_UNITS[self._unit]).split(self._sizes)
        for each in self._together:
            each.storage.index_copy_(0, each.index, parts[each.place])
        if self._singles:
            _torch.foreach_copy_(self._singles, [parts[place] for place in self._places])

    def fill(self, sources: Sequence[torch.Tensor]) -> Sequence[int]:
        """Fill those of them whose `sources`, one for each tensor, lie one behind the other; the numbers of the rest.

        `sources` live from now on, until others come.
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
        """`sources` as one, in units, if they lie one behind the other and elsewhere."""
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
    """`tensors`, which are 1-D and of one dtype, if some can be taken together; they have their memory now."""
    found = _runs(tensors, fewest=FEWEST, largest=LARGEST)
    return Scattered(tensors, found) if found else None


def _runs(tensors: Sequence[torch.Tensor], *, fewest: int, largest: int) -> list[range]:
    """Neighbours that lie in one storage of the CPU, at least so many."""

    def storage_of(number: int) -> int:
        each = tensors[number]
        fits = type(each) is torch.Tensor and each.is_cpu and each.is_contiguous() and 0 < each.nbytes <= largest
        return each.untyped_storage().data_ptr() if fits else 0

    groups: Iterator[tuple[int, Iterator[int]]] = itertools.groupby(range(len(tensors)), storage_of)
    found = [(storage, list(numbers)) for storage, numbers in groups]
    return [range(run[0], run[-1] + 1) for storage, run in found if storage and len(run) >= fewest]


def _seen(storage: torch.UntypedStorage, unit: int) -> torch.Tensor:
    """All of a storage in units, whether it has its memory or not."""
    with torch.inference_mode(False):  # it serves training, whatever pass needs it first
        made = torch.empty(0, dtype=_UNITS[unit], device="cpu")  # whatever is the default
        # The stubs of torch lack the overload for untyped storages.
        return made.set_(storage, 0, (storage.nbytes() // unit,))  # type: ignore[call-overload]


@lru_cache(1024)  # layers have one layout, in storages of their own
def _index(unit: int, starts: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """The places, in units, of what lies at `starts` (bytes)."""
    with torch.inference_mode(False):
        first, length = (torch.tensor(each, device="cpu") // unit for each in (starts, sizes))
        shift = first - length.cumsum(0) + length
        return torch.arange(int(length.sum()), device="cpu") + shift.repeat_interleave(length)
