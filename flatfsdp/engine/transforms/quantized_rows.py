"""Storage of tensors that are quantized in blocks: each row with the scales of its blocks, as bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class _Inner(NamedTuple):
    """One of the tensors inside: its name, its dimension of rows, and dtype and shape with that dimension first."""

    name: str
    dim: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class _State(NamedTuple):
    cls: Any
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
    inner: tuple[_Inner, ...]


class QuantizedRows:
    """Extensions that shard frozen tensors which are made of quantized values and scales, such as torchao's int8 and
    int4 weights: for `set_extensions`.

    A row of the stored tensor is one of the parameter: the bytes of its values, and of the scales and zero points of
    its blocks. So `Rows(k)` keeps blocks of `k` rows whole, with what dequantizes them, and any cut is put together
    again for modules, to the bit. The rows of each tensor inside are its first dimension of that
    size. Of scales with two such dimensions it may be the wrong one: then they are stored with other rows than those
    that they scale, and the tensor is put together to the bit all the same. Tensors of which some part has no dimension
    of rows are refused in words, as without this; trainable and plain ones are stored as they are.

    Example:
        >>> import torch
        >>> from flatfsdp.extensions import QuantizedRows, set_extensions
        >>> set_extensions(QuantizedRows())
        >>> set_extensions(None)
    """

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
        """The rows as bytes, and how to read them."""
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None or tensor.requires_grad or not tensor.dim():
            return tensor, None
        names, context = flatten()
        rows = tensor.shape[0]
        inner: list[_Inner] = []
        columns: list[torch.Tensor] = []
        for name in names:
            value = getattr(tensor, name)
            dim = next((dim for dim, size in enumerate(value.shape) if size == rows), None)
            if dim is None or type(value) is not torch.Tensor:
                return tensor, None
            first = value.detach().movedim(dim, 0)
            each = _Inner(name, dim, first.dtype, tuple(first.shape))
            inner.append(each)
            columns.append(_bytes_of(first.clone(memory_format=torch.contiguous_format), each))
        state = _State(type(tensor), context, tensor.shape, tuple(tensor.stride()), tuple(inner))
        return torch.cat(columns, 1), state

    def post_unflatten_transform(self, tensor: torch.Tensor, state: Any) -> torch.Tensor:
        """The tensor of the parameter's class, of copies."""
        found: dict[str, torch.Tensor] = {}
        start = 0
        for each in state.inner:
            values = tensor.new_empty(each.shape, dtype=each.dtype)
            rows = _bytes_of(values, each)
            rows.copy_(tensor.detach()[:, start : start + rows.shape[1]])
            found[each.name] = values.movedim(0, each.dim).contiguous()
            start += rows.shape[1]
        made: torch.Tensor = state.cls.__tensor_unflatten__(found, state.context, state.size, state.stride)
        return made


def _bytes_of(values: torch.Tensor, inner: _Inner) -> torch.Tensor:
    """The bytes of `values`, which are new, with the rows in the first dimension of both."""
    row = torch.Size(inner.shape[1:]).numel() * inner.dtype.itemsize
    return values.view(-1).view(torch.uint8).view(inner.shape[0], row)
