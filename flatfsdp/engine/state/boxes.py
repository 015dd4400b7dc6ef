"""Intervals of parameters as boxes, the form that distributed checkpoints use.

[Note: boxes] A rank owns an interval of a parameter's elements in memory order, `[start, stop)`. Checkpoints support
only boxes: N-D blocks with offsets and sizes. An interval of a row-major N-D parameter (N >= 1) is at most 2(N-1)+1
boxes: incomplete rows at its beginning and its end, for each dimension but the first, and complete rows in between.
Each box is again an interval, so its elements are contiguous. A parameter without dimensions is one box.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from ..layout.layout import ParamSpec, Span
from ..parts.part import blocks_of


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a parameter.

    Attributes:
        offsets, sizes: its first index and its extent, per dimension of the parameter.
        span: its elements in the parameter's memory order.
        order: the dimensions from the slowest to the fastest in memory; (0, 1, ...) for row-major parameters.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span
    order: tuple[int, ...]

    @property
    def sizes_in_memory(self) -> tuple[int, ...]:
        """The shape of the elements in memory order; `permute(back)` of that is the box."""
        return tuple(self.sizes[dim] for dim in self.order)

    @property
    def back(self) -> tuple[int, ...]:
        """The permutation from memory order to the parameter's dimensions."""
        return tuple(self.order.index(dim) for dim in range(len(self.order)))


@dataclass(frozen=True, slots=True)
class PartBox:
    """A block of the whole tensor of which a parameter is a part. [Note: parts of wholes]

    Attributes:
        offsets, sizes: its first index in the whole tensor, and its extent, per dimension.
        source: the box of the part that has its elements.
        inside: its first index in `source`.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    source: Box
    inside: tuple[int, ...]


def boxes_of_whole(spec: ParamSpec, span: Span) -> tuple[Box, ...] | tuple[PartBox, ...]:
    """The boxes of the whole tensor for `span` of a parameter, in the parameter's own memory order."""
    boxes = boxes_of(spec, span)
    if (part := spec.part) is None:
        return boxes
    return tuple(
        PartBox(offsets, sizes, box, inside)
        for box in boxes
        for offsets, sizes, inside in blocks_of(part, box.offsets, box.sizes)
    )


def runs_of_whole(spec: ParamSpec, span: Span) -> Iterator[tuple[Span, Span]]:
    """(elements of the part, elements of the whole) of each run that is contiguous in both, in the order of the part;
    together they are `span`. Precondition: part and whole have the same order of dimensions in memory."""
    whole, order = spec.whole, spec.whole.order
    shape, stored = ([each.shape[dim] for dim in order] for each in (whole, spec))
    last: tuple[Span, Span] | None = None
    for box in boxes_of_whole(spec, span):
        assert isinstance(box, PartBox)
        sizes = [box.sizes[dim] for dim in order]
        stored_offsets = [box.source.offsets[dim] + box.inside[dim] for dim in order]
        inner = _contiguous_from(sizes, shape)
        length = prod(sizes[inner:])
        starts = _starts([box.offsets[dim] for dim in order], sizes[:inner], shape)
        for own, start in zip(_starts(stored_offsets, sizes[:inner], stored), starts, strict=True):
            run = Span(own, own + length), Span(start, start + length)
            if last is not None and last[0].stop == own and last[1].stop == start:
                run = Span(last[0].start, run[0].stop), Span(last[1].start, run[1].stop)
            elif last is not None:
                yield last
            last = run
    if last is not None:
        yield last


def runs_of(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, Span]]:
    """The contiguous runs of a block in a row-major tensor: (first element of the tensor, elements of the block, itself
    row-major)."""
    inner = _contiguous_from(sizes, shape)
    length = prod(sizes[inner:])
    for number, start in enumerate(_starts(offsets, sizes[:inner], shape)):
        yield start, Span(number * length, (number + 1) * length)


def _contiguous_from(sizes: Sequence[int], shape: Sequence[int]) -> int:
    """The dimension from which on elements of a block of these sizes are contiguous in a row-major `shape`."""
    dim = len(shape) - 1
    while dim > 0 and sizes[dim] == shape[dim]:
        dim -= 1
    return max(dim, 0)


def _starts(offsets: Sequence[int], outer: Sequence[int], shape: Sequence[int]) -> Iterator[int]:
    """The first elements, in a row-major `shape`, of the runs of a block at `offsets`: one for each index of its
    `outer` dimensions."""
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * step for offset, step in zip(offsets, steps, strict=True))
    for index in product(*map(range, outer)):
        yield first + sum(each * step for each, step in zip(index, steps, strict=False))


def boxes_of(spec: ParamSpec, span: Span) -> tuple[Box, ...]:
    """The boxes of `span` of a parameter (in memory order), in order; none for an empty span.

    For an empty parameter it is always one empty box; the caller decides whether that is needed.
    """
    order = spec.order
    shape = tuple(spec.shape[dim] for dim in order)
    if spec.numel == 0:
        return (Box((0,) * len(shape), spec.shape, Span(0, 0), order),)
    boxes = []
    for offsets, sizes, start in _cut(shape, span.start, span.stop):
        where = dict(zip(order, zip(offsets, sizes, strict=True), strict=True))
        boxes.append(
            Box(
                tuple(where[dim][0] for dim in range(len(shape))),
                tuple(where[dim][1] for dim in range(len(shape))),
                Span(start, start + prod(sizes)),
                order,
            )
        )
    return tuple(boxes)


def _cut(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """(offsets, sizes, first element) of the boxes of `[start, stop)` in a row-major `shape`."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,), start) if shape else ((), (), 0)
        return
    row = prod(shape[1:])
    first, inside = divmod(start, row)
    last, remainder = divmod(stop, row)
    if first == last:  # within one row
        yield from _within(shape, first, inside, remainder)
        return
    if inside:
        yield from _within(shape, first, inside, row)
        first += 1
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]), first * row
    if remainder:
        yield from _within(shape, last, 0, remainder)


def _within(
    shape: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    base = index * prod(shape[1:])
    for offsets, sizes, first in _cut(shape[1:], start, stop):
        yield (index, *offsets), (1, *sizes), base + first
