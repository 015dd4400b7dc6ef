"""Strides of tensors that are divided by rows along a dimension."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout.layout import ParamSpec


def stride_by_rows(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """The stride of a dense tensor whose slowest dimension in memory is `dim`, followed by the others in order; so
    `ParamSpec.order` begins with `dim`.

    Example:
        >>> stride_by_rows((2, 3, 4), 1)
        (4, 8, 1)
    """
    stride, step = [0] * len(shape), 1
    for each in (*reversed([other for other in range(len(shape)) if other != dim]), dim)[: len(shape)]:
        stride[each] = step
        step *= max(shape[each], 1)
    if shape and ParamSpec("", tuple(shape), tuple(stride)).order[0] != dim:
        stride[dim] = max(stride) + 1  # with at most one row, so this stride moves nothing
    return tuple(stride)
