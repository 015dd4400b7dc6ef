"""Intervals as boxes, against painting every element."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch

from flatfsdp.engine.layout.layout import ParamSpec, Span
from flatfsdp.engine.state.boxes import boxes_of

pytestmark = pytest.mark.unit

SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]


def strides_of(shape: tuple[int, ...]) -> list[tuple[int, ...] | None]:
    """Row-major and the memory order of every permutation of the dimensions."""
    out: list[tuple[int, ...] | None] = [None]
    for order in itertools.permutations(range(len(shape))):
        stride, step = [0] * len(shape), 1
        for dim in reversed(order):
            stride[dim] = step
            step *= shape[dim]
        out.append(tuple(stride))
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_paint_the_interval_once_and_nothing_else(shape: tuple[int, ...]) -> None:
    numel = prod(shape)
    for stride in strides_of(shape):
        spec = ParamSpec("p", shape, stride)
        for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
            boxes = boxes_of(spec, Span(start, stop))
            memory = torch.zeros(numel, dtype=torch.int64)
            canvas = memory.view(shape) if stride is None else memory.as_strided(shape, stride)
            numbers = torch.arange(numel)
            for box in boxes:
                block = canvas
                for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    block = block.narrow(dim, offset, size)
                data = numbers[box.span.slice].view(box.sizes_in_memory).permute(box.back)
                assert data.shape == block.shape == torch.Size(box.sizes)
                block += data + 1
            expected = torch.zeros_like(memory)
            expected[start:stop] = numbers[start:stop] + 1
            assert torch.equal(memory, expected), (shape, stride, start, stop)
            assert len(boxes) <= max(1, 2 * (len(shape) - 1) + 1)


def test_the_bound_is_reached() -> None:
    assert len(boxes_of(ParamSpec("p", (3, 3, 3)), Span(1, 26))) == 5


def test_an_empty_parameter_is_one_empty_box_and_an_empty_interval_none() -> None:
    (box,) = boxes_of(ParamSpec("p", (3, 0)), Span(0, 0))
    assert box.offsets == (0, 0) and box.sizes == (3, 0)
    assert boxes_of(ParamSpec("p", (3, 2)), Span(2, 2)) == ()
