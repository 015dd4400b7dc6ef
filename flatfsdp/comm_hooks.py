"""Communication hooks to start from: functions for `register_comm_hook` that average gradients, and their state.

Each takes `(state, grad)` if parameters are replicated, and `(state, grad, shard)` if they are sharded: `grad` is
this rank's unsharded flat gradient, 1-D, padded, in the reduce dtype and not scaled. The mean over the ranks of the
state's process group is left in `grad`, or this rank's piece of it in `shard`. They compute the same as the hooks of
the same names in `torch.distributed.algorithms`, which may also be registered, and share states with them.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .errors import refuse_type

# torch renames its flat collectives; the newest name is the one without a deprecation warning.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

__all__ = ["DefaultState", "allreduce_hook", "bf16_compress_hook", "fp16_compress_hook", "reduce_scatter_hook"]


class State(Protocol):
    """The attributes that the hooks read: the ranks, and two factors whose product is their number."""

    process_group: Any
    gradient_predivide_factor: float
    gradient_postdivide_factor: float


class DefaultState:
    """The ranks over which gradients are averaged, and the factors for the division by their number.

    Gradients are divided before they are summed, so that the sum does not overflow, and again after it, so that small
    ones do not vanish before it: both times by about the square root of the number of ranks, the first time by a power
    of two, which is exact. That comes from fairscale's FSDP; the factors are FSDP1's, except for some numbers of ranks
    that are not powers of two, where its first one is smaller.

    Attributes:
        process_group: the ranks; for the hybrid strategies, the shard group, `model.process_group`.
        world_size: their number.
        gradient_predivide_factor: the smallest power of two that is at least the square root of `world_size`.
        gradient_postdivide_factor: the rest, `world_size / gradient_predivide_factor`.
    """

    def __init__(self, process_group: Any) -> None:
        """Raises ConfigTypeError: `process_group` is None."""
        if process_group is None:
            refuse_type("process_group", None, "a torch.distributed.ProcessGroup", hint="Pass model.process_group.")
        self.process_group = process_group
        self.world_size: int = dist.get_world_size(process_group)
        self.gradient_predivide_factor = 2.0 ** math.ceil(math.log2(self.world_size) / 2)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor


def allreduce_hook(state: State, grad: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """The mean of `grad` over ranks, in `grad`; for sharded parameters this rank's piece, in `shard`.

    Sends twice as much as `reduce_scatter_hook`. Collective over the state's process group.
    """
    grad.div_(state.gradient_predivide_factor)
    dist.all_reduce(grad, group=state.process_group)
    grad.div_(state.gradient_postdivide_factor)
    if shard is not None:
        shard.copy_(grad.view(-1, shard.numel())[dist.get_rank(state.process_group)])


def reduce_scatter_hook(state: State, grad: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """This rank's piece of the mean of `grad` over ranks, in `shard`; all of it, in `grad`, for replicated parameters.

    Overwrites `grad`. Collective over the state's process group.
    """
    if shard is None:
        allreduce_hook(state, grad)
        return
    grad.div_(state.gradient_predivide_factor)
    _reduce_scatter(shard, grad, group=state.process_group)
    shard.div_(state.gradient_postdivide_factor)


def fp16_compress_hook(state: State, grad: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """As `reduce_scatter_hook`, with gradients that are sent, and summed, in fp16. Collective."""
    _compressed(torch.float16, state, grad, shard)


def bf16_compress_hook(state: State, grad: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """As `reduce_scatter_hook`, with gradients that are sent, and summed, in bf16. Collective."""
    _compressed(torch.bfloat16, state, grad, shard)


def _compressed(dtype: torch.dtype, state: State, grad: torch.Tensor, shard: torch.Tensor | None) -> None:
    result = grad if shard is None else shard
    small = grad.to(dtype)
    mean = small if shard is None else shard.to(dtype)
    reduce_scatter_hook(state, small, None if shard is None else mean)
    result.copy_(mean)
