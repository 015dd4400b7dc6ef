"""Tensors that have shapes, dtypes and devices, but neither memory nor values, for dry runs.

[Note: fake tensors] They are torch's fake tensors. However, single numbers and lists of integers that are created from
Python values stay real tensors: meshes, step counts and the like are read, and are small.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from ..base import _torch, overrides

# Operations that write into their first argument: skipped, since fake tensors have no values.
_WRITING = frozenset(
    f"aten::{name}_"
    for name in "copy _foreach_copy _foreach_add zero fill add sub mul div lerp addcmul addcdiv sqrt sign".split()
)


@contextmanager
def without_memory(device: Any = None) -> Iterator[None]:
    """A context in which new tensors have neither memory nor values, even if computed from tensors that have.

    `device`: its `computed(func, args, result)` is called after operations, except those of values.
    """
    mode = _mode_class()()
    mode.device = device
    with overrides.without_memory.being(mode), warnings.catch_warnings(), mode:
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


def stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The fake tensor for `tensor` on `device` inside `without_memory()`: always the same one, which preserves ties."""
    if isinstance(tensor, _torch.fake_tensors().FakeTensor) and tensor.device == device:
        return tensor
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = overrides.without_memory.value.stand_ins
    if id(tensor) not in known:
        # Not empty_like, nor shape and dtype in one call: integer tensors would get memory.
        memory = torch.empty(_extent(tensor), dtype=torch.float32, device=device)
        made = memory.to(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        for name, value in vars(tensor).items():
            vars(made).setdefault(name, value)
        known[id(tensor)] = tensor, made
    return known[id(tensor)][1]


def _extent(tensor: torch.Tensor) -> int:
    """The number of elements in memory from the first to the last one of `tensor`."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0


@cache
def _mode_class() -> Any:
    fake = _torch.fake_tensors()
    base: Any = fake.FakeTensorMode

    class Memoryless(base):
        def __init__(self) -> None:
            super().__init__(allow_non_fake_inputs=True)
            self.stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # (original, fake) by id of the original
            self.device: Any = None  # what observes operations, if anything
            self._inside = False  # an operation that torch computes by others

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, _, _ = func.name().partition(".")
            if name == "prim::device" and isinstance(args[0], fake.FakeTensor):
                return args[0].fake_device  # a shortcut for the most frequent call
            kwargs, tensors = kwargs or {}, _tensors_in(args)
            if _has_values(name, tensors, args, kwargs.get("dtype"), fake.FakeTensor):
                return func(*args, **kwargs)
            if name in _WRITING and isinstance(tensors[0], fake.FakeTensor):
                return None if name.startswith("aten::_foreach") else args[0]
            if self.device is None or self._inside:
                return super().__torch_dispatch__(func, types, args, kwargs)
            if name == "aten::add" and _torch.is_sum_of_autograd(func, args):
                func = torch.ops.aten.add_.Tensor
            self._inside = True
            self.cache_enabled = name != "aten::set_"  # an entry would keep the storage
            try:
                result = super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self._inside = False
            self.device.computed(func, args, result)
            return result

    return Memoryless


def _tensors_in(args: Any) -> list[torch.Tensor]:
    lists = [arg for arg in args if isinstance(arg, list)]
    return [each for group in (args, *lists) for each in group if isinstance(each, torch.Tensor)]


def _has_values(name: str, tensors: list[torch.Tensor], args: Any, dtype: torch.dtype | None, fake: Any) -> bool:
    """Whether an operation has only real inputs, or without inputs creates a small tensor whose values are read."""
    if tensors:
        return not any(isinstance(tensor, fake) or tensor.is_meta for tensor in tensors)
    if args and isinstance(args[0], (list, tuple)) and not args[0]:  # the shape of a single number
        return True
    if dtype is None:
        return name == "aten::arange" and all(isinstance(arg, int) for arg in args)
    return dtype in (torch.int32, torch.int64)  # smaller ones are packed weights
