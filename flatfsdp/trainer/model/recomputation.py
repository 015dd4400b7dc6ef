"""Activation checkpointing: a module whose forward runs again in the backward, in place of keeping what it computed.

The module stays what it is, names included: only its attribute `forward` changes. Inside a unit, so that the unit is
gathered once for what runs again and for its gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from flatfsdp import FullyShardedDataParallel


def recompute_units(model: nn.Module) -> int:
    """Let each unit inside `model` but the outermost compute its activations again; returns how many those are.

    The outermost unit would have to keep everything that it computes again at once. Batch norms, which are units of
    their own under mixed precision, keep nothing that would be worth it.
    """
    wrappers = FullyShardedDataParallel.fsdp_modules(model)
    inside = [each.module for each in wrappers if isinstance(each, FullyShardedDataParallel) and each is not model]
    meant = [module for module in inside if not _is_batch_norm(module)]
    for module in meant:
        recompute(module)
    return len(meant)


def recompute(module: nn.Module) -> None:
    """Let the forwards of `module` with gradients keep their inputs only, and run again in the backward.

    What runs again draws the same random numbers, and what it writes to buffers, such as running statistics, is
    dropped. Copies and pickles of the module have it, too. Once, however often it is called.
    """
    if not is_recomputed(module):
        module.forward = _RecomputedForward(module, module.__dict__.get("forward"))


def is_recomputed(module: nn.Module) -> bool:
    """Whether `recompute` was called for `module`."""
    return isinstance(module.__dict__.get("forward"), _RecomputedForward)


class _RecomputedForward:
    """The forward of a module, to which it does not hold on: a circle would keep the memory of a deleted model."""

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self._module = weakref.ref(module)
        self._own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "it is called by its module"
        forward = self._own or MethodType(type(module).forward, module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        contexts = partial(_first_and_again, buffers) if (buffers := _buffers_of(module)) else noop_context_fn
        # Keywords are bound, lest they be taken for those of checkpoint().
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=contexts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _RecomputedForward, (self._module(), self._own)


@dataclass(frozen=True)
class _CastBuffer:
    """A buffer, and the dtype in which the first run read it: the unit may have cast it for that run only."""

    module: nn.Module
    name: str
    dtype: torch.dtype


def _buffers_of(module: nn.Module) -> list[_CastBuffer]:
    inside = ((each, *named) for each in module.modules() for named in each.named_buffers(recurse=False))
    return [_CastBuffer(each, name, buffer.dtype) for each, name, buffer in inside]


def _first_and_again(buffers: list[_CastBuffer]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _copies_of(buffers)


@contextmanager
def _copies_of(buffers: list[_CastBuffer]) -> Iterator[None]:
    """Copies in their places: a batch norm that runs again would follow the same batch twice."""
    originals = [getattr(each.module, each.name) for each in buffers]
    try:
        for each, original in zip(buffers, originals, strict=True):
            setattr(each.module, each.name, original.to(each.dtype, copy=True))
        yield
    finally:
        for each, original in zip(buffers, originals, strict=True):
            setattr(each.module, each.name, original)


def _is_batch_norm(module: nn.Module) -> bool:
    return getattr(module, "track_running_stats", False) is True
