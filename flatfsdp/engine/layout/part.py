"""Which part of a whole tensor is stored here, where ranks of another mesh store the others.

[Note: parts of wholes] Tensor parallelism splits a parameter before it comes to a unit: what the flat parameter
stores, gathers and reduces is this rank's *part* of the *whole*, and layouts know the part's shape. What leaves a unit
by name (state dicts, states of optimizers, checkpoints) has the whole's. A part is a product of ranges, some along each
dimension, mostly one. Several ranks may store the same part: these are *copies*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from ...errors import InternalError

Range = tuple[int, int]  # (first, length) along a dimension of the whole
Ranges = tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a whole tensor.

    Attributes:
        shape: of the whole; stride: of the whole, None where that is row-major.
        ranges: for each dimension what the part has of it, in the order in which it is stored.
        copy: the number of this copy, of those that ranks store of the same part.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    ranges: tuple[Ranges, ...]
    copy: int = 0

    def __post_init__(self) -> None:
        for size, ranges in zip(self.shape, self.ranges, strict=True):
            if any(first < 0 or length < 1 or first + length > size for first, length in ranges):
                raise InternalError(f"ranges {ranges} of a dimension of {size} elements")

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(sum(length for _, length in ranges) for ranges in self.ranges)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor, in order."""
        return all(ranges == ((0, size),) for size, ranges in zip(self.shape, self.ranges, strict=True) if size)

    def blocks(
        self, offsets: Iterable[int], sizes: Iterable[int]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """(offsets in the whole, sizes, offsets in the block) of each block of the whole that a block of the part,
        given by its offsets and sizes, consists of."""
        sides = zip(self.ranges, offsets, sizes, strict=True)
        for places in product(*(list(_within(ranges, offset, size)) for ranges, offset, size in sides)):
            yield (
                tuple(whole for whole, _, _ in places),
                tuple(length for _, length, _ in places),
                tuple(inside for _, _, inside in places),
            )


def _within(ranges: Ranges, offset: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(first in the whole, length, first in the interval) of what `[offset, offset + size)` of `ranges` consists of."""
    start = 0
    for first, length in ranges:
        begin, end = max(start, offset), min(start + length, offset + size)
        if begin < end:
            yield first + begin - start, end - begin, begin - offset
        start += length


def chunk(ranges: Ranges, count: int, place: int) -> Ranges:
    """Number `place` of the `count` chunks of `ranges`, as torch.chunk makes them: the last ones may be shorter, or
    empty."""
    total = sum(length for _, length in ranges)
    size = -(-total // count)
    return joined((whole, length) for whole, length, _ in _within(ranges, place * size, size))


def strided_chunk(ranges: Ranges, count: int, place: int, split_factor: int) -> Ranges:
    """What is left of `ranges` where each of `split_factor` chunks of them is divided into `count` again: number
    `place` of each."""
    return joined(
        each for outer in range(split_factor) for each in chunk(chunk(ranges, split_factor, outer), count, place)
    )


def cut(ranges: Ranges, count: int, place: int, split_factor: int | None) -> Ranges:
    """`chunk`, or `strided_chunk` with a `split_factor`."""
    return chunk(ranges, count, place) if split_factor is None else strided_chunk(ranges, count, place, split_factor)


@lru_cache(maxsize=1024)
def shown_elsewhere(size: int, cuts: tuple[tuple[int, int | None], ...], last: int) -> tuple[int, ...] | None:
    """A place that has other ones of `size` elements if `cuts`, each a count and a split factor, are made in order than
    if number `last` of them is made at the end, into chunks; None where no place has."""
    others = [i for i in range(len(cuts)) if i != last]
    if size % prod(cuts[i][0] for i in others) == 0:
        return None  # `last` cuts pieces of one size
    for places in product(*(range(count) for count, _ in cuts)):
        shown = held = joined([(0, size)])
        for i, (count, split_factor) in enumerate(cuts):
            shown = cut(shown, count, places[i], split_factor)
        for i in others:
            held = cut(held, cuts[i][0], places[i], cuts[i][1])
        if shown != chunk(held, cuts[last][0], places[last]):
            return places
    return None


def joined(ranges: Iterable[Range]) -> Ranges:
    """`ranges` with those that continue one another as one."""
    out: list[Range] = []
    for first, length in ranges:
        if out and sum(out[-1]) == first:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((first, length))
    return tuple(out)
