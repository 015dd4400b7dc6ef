"""The dtypes of a flat parameter, and the scaling of gradients.

[Note: dtypes] *Master*: the shard that the optimizer sees. *Compute*: the unsharded parameters. *Reduce*: gradients in
reductions. *Accumulate*: unsharded gradients that are accumulated without reductions (`no_sync`).
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
    # The dtype of block-wise quantized parameters in gathers; None: not quantized.
    gather: torch.dtype | None = None
    # The bits of block-wise quantized gradients in reductions; None: not quantized.
    reduce_bits: int | None = None
    # Whether the quantization errors of gradients are added to the next gradients.
    error_feedback: bool = False


def resolve(mixed: MixedPrecision, master: torch.dtype) -> Precision:
    """The dtypes for parameters stored as `master`.

    Parameters that are not floating point (packed bytes, integers, booleans) are never cast, nor are complex ones,
    whose imaginary parts a cast would drop.
    """
    few_bits = mixed.gather_dtype, mixed.reduce_bits, mixed.reduce_error_feedback
    if not master.is_floating_point:
        return Precision(master, master, master, master, master, *(few_bits if master.is_complex else ()))
    compute = mixed.param_dtype or master
    # FSDP1's rule: the reduce dtype is by default the compute dtype.
    reduce = mixed.reduce_dtype or compute
    accumulate = mixed.accumulate_dtype or reduce
    grad = reduce if mixed.keep_low_precision_grads else master
    return Precision(master, compute, reduce, accumulate, grad, *few_bits)


@lru_cache(maxsize=64)
def gradient_scaling(world: int, reduce: torch.dtype, divide_by: float | None = None) -> tuple[float, float]:
    """(factor before the sum, factor after the sum), whose product is 1 / `divide_by`, by default 1 / `world`.

    [Note: scaling] fp32 and bf16 have the range to sum first and scale once. fp16 does not: in a large world the sum of
    normal gradients overflows. So each gradient is divided before the sum by the smallest power of two that is at least
    `world` (which is exact, except for subnormals), and the rest of the factor is applied afterwards.
    """
    divisor = world if divide_by is None else divide_by
    if reduce == torch.float16 and world > 1:
        before = 1 << (world - 1).bit_length()
        return 1.0 / before, before / divisor
    return 1.0, 1.0 / divisor
