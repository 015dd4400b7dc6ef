"""Buffers in the buffer dtype while their unit's forward runs, in their own dtype and with their own values at all
other times.

FSDP1 casts buffers permanently, which loses their original precision. Here a forward sees copies; the elements that it
changes are copied back to the original afterwards. Values are compared, not version counters: batch norm writes its
running statistics without incrementing any version counter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..runtime.unit import Unit


def attach_buffer_casting(unit: Unit) -> None:
    """Let forwards of `unit`, which is new, compute with buffers in the buffer dtype, if there is one."""
    if (dtype := unit.built.mixed_precision.buffer_dtype) is not None:
        unit.around = functools.partial(_run, dtype)


def _run(dtype: torch.dtype, unit: Unit, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if unit.in_full_precision:
        return call(*args, **kwargs)
    with cast_buffers(unit.built.modules, dtype):
        return call(*args, **kwargs)


@contextmanager
def cast_buffers(modules: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """A context in which the floating-point buffers registered in `modules` themselves (not in their children) are in
    `dtype`."""
    swapped = []
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                copy = buffer.detach().to(dtype)
                module._buffers[name] = copy
                swapped.append((module, name, buffer, copy))
    try:
        yield
    finally:
        for module, name, original, copy in swapped:
            now = module._buffers.get(name)
            if now is None:
                continue
            module._buffers[name] = original
            if now is not copy:  # the forward registered another tensor in its place
                module._buffers[name] = now.to(original.dtype)
                continue
            # Written elements are copied back, the others keep their precision. Versions do not show the writes: batch
            # norm writes its statistics without incrementing them.
            with torch.no_grad():
                original.copy_(torch.where(copy == original.to(copy.dtype), original, copy.to(original.dtype)))
