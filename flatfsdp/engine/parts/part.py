"""This rank's part of a whole tensor, whose other parts are on other ranks of another mesh dimension.

[Note: parts of wholes] Tensor parallelism splits a parameter before it is added to a unit: the flat parameter stores,
gathers and reduces this rank's *part* of the *whole* tensor, and layouts have the part's shape. Named values (state
dicts, optimizer states, checkpoints) have the shape of the whole. A part is a product of ranges, with one or more along
each dimension, usually one. Several ranks may store the same part: these are *copies*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from math import prod

from ..layout.layout import Part

Range = tuple[int, int]  # (first, length) along a dimension of the whole
Ranges = tuple[Range, ...]


def stored_shape(part: Part) -> tuple[int, ...]:
    """The shape of the part."""
    return tuple(sum(length for _, length in ranges) for ranges in part.ranges)


def is_whole(part: Part | None) -> bool:
    """Whether the part is the complete tensor, in order; None: an independent tensor."""
    if part is None:
        return True
    return all(ranges == ((0, size),) for size, ranges in zip(part.shape, part.ranges, strict=True) if size)


def blocks_of(
    part: Part, offsets: Iterable[int], sizes: Iterable[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """The blocks of the whole that make up the block of the part with these offsets and sizes, each as (offsets in the
    whole, sizes, offsets in the block)."""
    sides = zip(part.ranges, offsets, sizes, strict=True)
    for found in product(*(list(_within(ranges, offset, size)) for ranges, offset, size in sides)):
        yield (
            tuple(whole for whole, _, _ in found),
            tuple(length for _, length, _ in found),
            tuple(inside for _, _, inside in found),
        )


def _within(ranges: Ranges, offset: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The parts of `[offset, offset + size)` of `ranges`, as (first in the whole, length, first in the interval)."""
    start = 0
    for first, length in ranges:
        begin, end = max(start, offset), min(start + length, offset + size)
        if begin < end:
            yield first + begin - start, end - begin, begin - offset
        start += length


def shard(ranges: Ranges, count: int, index: int) -> Ranges:
    """Shard `index` of the `count` shards of `ranges`, as `Shard()` of a DTensor and torch.chunk divide: the last ones
    may be shorter, or empty."""
    total = sum(length for _, length in ranges)
    size = -(-total // count)
    return joined((whole, length) for whole, length, _ in _within(ranges, index * size, size))


def strided_shard(ranges: Ranges, count: int, index: int, split_factor: int) -> Ranges:
    """The ranges that remain if each of `split_factor` shards of `ranges` is divided into `count` again, and number
    `index` of each is taken."""
    return joined(
        each for outer in range(split_factor) for each in shard(shard(ranges, split_factor, outer), count, index)
    )


def cut(ranges: Ranges, count: int, index: int, split_factor: int | None) -> Ranges:
    """`shard`, or `strided_shard` with a `split_factor`."""
    return shard(ranges, count, index) if split_factor is None else strided_shard(ranges, count, index, split_factor)


@lru_cache(maxsize=1024)
def shown_elsewhere(size: int, cuts: tuple[tuple[int, int | None], ...], last: int) -> tuple[int, ...] | None:
    """The coordinates of a rank that gets other elements of `size` if `cuts` (each a count and a split factor) are made
    in order than if number `last` of them is made at the end, into `Shard()`s; None if there is no such rank."""
    others = [i for i in range(len(cuts)) if i != last]
    if size % prod(cuts[i][0] for i in others) == 0:
        return None  # `last` cuts pieces of one size
    for coordinates in product(*(range(count) for count, _ in cuts)):
        shown = held = joined([(0, size)])
        for i, (count, split_factor) in enumerate(cuts):
            shown = cut(shown, count, coordinates[i], split_factor)
        for i in others:
            held = cut(held, cuts[i][0], coordinates[i], cuts[i][1])
        if shown != shard(held, cuts[last][0], coordinates[last]):
            return coordinates
    return None


def joined(ranges: Iterable[Range]) -> Ranges:
    """`ranges`, with adjacent ones merged."""
    out: list[Range] = []
    for first, length in ranges:
        if out and sum(out[-1]) == first:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((first, length))
    return tuple(out)
