"""Buffers in the buffer dtype while their unit's forward runs, in their own dtype and with their own values at all
other times.

FSDP1 casts buffers permanently, which loses their original precision. Here a forward sees copies; the elements that it
changes are copied back to the original afterwards. Values are compared, not version counters: batch norm writes its
running statistics without incrementing any version counter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

_AS_THEY_ARE: AbstractContextManager[None] = nullcontext()


def cast_buffers(modules: Sequence[nn.Module], dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """A context in which the floating-point buffers registered in `modules` themselves (not in their children) are in
    `dtype`; if it is None, they are left unchanged."""
    return _AS_THEY_ARE if dtype is None else _cast(modules, dtype)


@contextmanager
def _cast(modules: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
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
