"""Tensors as intervals, and intervals as boxes of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..engine.layout.layout import ParamSpec, Span
from ..engine.state.boxes import Box, boxes_of
from ..engine.state.owned_interval import OwnedInterval

# The largest buffer in host memory in addition to the tensors themselves, in bytes.
LARGEST = 2**24


def as_interval(name: str, value: torch.Tensor) -> OwnedInterval:
    """`value`, or for a whole tensor the interval of all its elements, row-major (of a copy, where needed)."""
    if isinstance(value, OwnedInterval):
        return value.with_local(value.local.detach())
    flat = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return OwnedInterval(flat, ParamSpec(name, tuple(value.shape)), Span(0, value.numel()))


def intervals_of(name: str, value: torch.Tensor) -> list[OwnedInterval]:
    """`as_interval`, as intervals of the whole tensor. [Note: parts of wholes]"""
    return as_interval(name, value).of_whole()


@contextmanager
def filling(name: str, target: torch.Tensor) -> Iterator[list[OwnedInterval]]:
    """`target` as intervals to be filled. A whole tensor that is not row-major is filled from a copy at the end."""
    if isinstance(target, OwnedInterval):
        yield target.of_whole()
    elif target.is_contiguous() and not (target.is_conj() or target.is_neg()):
        yield [as_interval(name, target)]
    else:
        interval = as_interval(name, torch.empty(target.shape, dtype=target.dtype, device=target.device))
        yield [interval]
        target.detach().copy_(interval.local.view(target.shape))


def cut(spec: ParamSpec, span: Span, most: int) -> Iterator[Box]:
    """`span` of a parameter as boxes of at most `most` elements each, in order."""
    for box in boxes_of(spec, span):
        if box.span.numel <= most:
            yield box
            continue
        step = box.span.numel
        for size in box.sizes_in_memory:
            step //= size
            if size > 1:
                break
        step *= max(1, most // step)
        for start in range(box.span.start, box.span.stop, step):
            yield from cut(spec, Span(start, min(box.span.stop, start + step)), most)
