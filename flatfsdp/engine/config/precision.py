"""Which dtype serves what.

[Note: dtypes] *Master*: the shard that the optimizer sees. *Compute*: the unsharded parameters. *Reduce*: what travels
when gradients are reduced. *Accumulate*: what unsharded gradients add up in while nothing is reduced (`no_sync`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...api import MixedPrecision


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of one flat parameter."""

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype
    # The dtype in which the optimizer sees gradients: the master dtype unless low precision is kept on request.
    grad: torch.dtype
    # What unsharded parameters travel as, in blocks; None as they are.
    gather: torch.dtype | None = None
    # Of a number when gradients travel, in blocks; None as they are.
    reduce_bits: int | None = None
    # Whether what these lose is added to the next ones.
    error_feedback: bool = False


def resolve(mixed: MixedPrecision, master: torch.dtype) -> Precision:
    """The dtypes for parameters stored as `master`.

    Parameters that are not floating point (packed bytes, integers, booleans) are never cast.
    """
    if not (master.is_floating_point or master.is_complex):
        return Precision(master, master, master, master, master)
    compute = mixed.param_dtype or master
    # FSDP1's rule: a reduce dtype that is not given follows the compute dtype.
    reduce = mixed.reduce_dtype or compute
    accumulate = mixed.accumulate_dtype or reduce
    grad = reduce if mixed.keep_low_precision_grads else master
    few_bits = mixed.gather_dtype, mixed.reduce_bits, mixed.reduce_error_feedback
    return Precision(master, compute, reduce, accumulate, grad, *few_bits)


@lru_cache(maxsize=64)
def gradient_scaling(world: int, reduce: torch.dtype, divide_by: float | None = None) -> tuple[float, float]:
    """(factor on the way into the slot, factor after the sum) whose product is 1 / `divide_by`, or else 1 / `world`.

    [Note: scaling] fp32 and bf16 have the range to sum first and scale once. fp16 does not: at a large world the sum of
    healthy gradients overflows, so each is divided on the way in by the smallest power of two that is at least `world`
    (exact, but for subnormals) and the rest is made up afterwards.
    """
    divisor = world if divide_by is None else divide_by
    if reduce == torch.float16 and world > 1:
        before = 1 << (world - 1).bit_length()
        return 1.0 / before, before / divisor
    return 1.0, 1.0 / divisor
