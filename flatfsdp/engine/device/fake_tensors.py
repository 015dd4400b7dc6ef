"""Tensors that have shapes, dtypes and devices, but neither memory nor values: what a dry run computes with.

[Note: fake tensors] They are torch's fake tensors. But single numbers, and lists of whole ones, that are made from
nothing else stay what they are: meshes, counts of steps and the like are read, and are small.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from ..base import _torch
from ..base.overrides import Override

# They write values into their first argument, and there are none.
_WRITING = frozenset(
    f"aten::{name}_"
    for name in "copy _foreach_copy _foreach_add zero fill add sub mul div lerp addcmul addcdiv sqrt sign".split()
)

_mode: Override[Any] = Override(None)


@contextmanager
def without_memory() -> Iterator[None]:
    """Inside, tensors that are made have neither memory nor values, whatever is in them of those made before."""
    with _mode.being(_kind_of_mode()()), warnings.catch_warnings(), _mode.value:
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


def is_memoryless() -> bool:
    """Whether the caller is inside `without_memory()`."""
    return _mode.value is not None


def stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What stands for `tensor` on `device` inside `without_memory()`: the same at every call, so that ties survive."""
    if isinstance(tensor, _torch.fake_tensors().FakeTensor) and tensor.device == device:
        return tensor
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = _mode.value.stand_ins
    if id(tensor) not in known:
        # Neither empty_like nor its shape and dtype at once: what is to have no memory could get some.
        memory = torch.empty(_extent(tensor), dtype=torch.float32, device=device)
        made = memory.to(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        for name, value in vars(tensor).items():
            vars(made).setdefault(name, value)
        known[id(tensor)] = tensor, made
    return known[id(tensor)][1]


def _extent(tensor: torch.Tensor) -> int:
    """Elements of memory from the first of `tensor` to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0


@cache
def _kind_of_mode() -> Any:
    fake = _torch.fake_tensors()
    base: Any = fake.FakeTensorMode

    class Memoryless(base):
        def __init__(self) -> None:
            super().__init__(allow_non_fake_inputs=True)
            self.stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of what they stand for

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, _, _ = func.name().partition(".")
            if name == "prim::device" and isinstance(args[0], fake.FakeTensor):
                return args[0].fake_device  # most of all calls
            kwargs, tensors = kwargs or {}, _tensors_in(args)
            if _has_values(name, tensors, args, kwargs.get("dtype"), fake.FakeTensor):
                return func(*args, **kwargs)
            if name in _WRITING and isinstance(tensors[0], fake.FakeTensor):
                return None if name.startswith("aten::_foreach") else args[0]
            return super().__torch_dispatch__(func, types, args, kwargs)

    return Memoryless


def _tensors_in(args: Any) -> list[torch.Tensor]:
    lists = [arg for arg in args if isinstance(arg, list)]
    return [each for group in (args, *lists) for each in group if isinstance(each, torch.Tensor)]


def _has_values(name: str, tensors: list[torch.Tensor], args: Any, dtype: torch.dtype | None, fake: Any) -> bool:
    """Whether an operation has values to compute with, or makes some that are read."""
    if tensors:
        return not any(isinstance(tensor, fake) or tensor.is_meta for tensor in tensors)
    if args and isinstance(args[0], (list, tuple)) and not args[0]:  # the shape of a single number
        return True
    if dtype is None:
        return name == "aten::arange" and all(isinstance(arg, int) for arg in args)
    return dtype in (torch.int32, torch.int64)  # smaller ones are packed weights
