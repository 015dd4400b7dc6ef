"""Assumptions on the memory that operations take and no tensor shows, each with its reason.

[Note: workspaces] cuBLAS gets a workspace for each of its handles and streams at the first product, and keeps it.
Handles belong to threads: that of the forward, and that in which autograd runs. On Hopper torch takes 32 MiB (its
default, 4096 KiB times 8), and for products with a bias, by cuBLASLt, another of 1 MiB. The allocator's own books on an
H100 show it: after a step the model's code held 33 MiB, and autograd's thread 32 MiB
(`tools/bench_results/gpu/results.json`, "terms").

[Note: attention] Either fused kernel (cuDNN's, which torch prefers on Hopper, and flash attention) saves its output and
a float32 per row, and in the backward adds up the query's gradient in float32, beside a float32 per row.

[Note: sums over rows] The gradient of a bias is a sum over the rows of a matrix. torch splits the rows among blocks of
threads, which exchange partial sums through temporary memory: a float32 for each output, block, and lane of the block,
which is many times the matrix. The split follows torch's `setReduceConfig`, on a card like the H100. The temporary
memory of other kernels (normalization, the embedding's gradient for few tokens) is below 1 MiB and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..base import _torch
from .allocator import MIB
from .simulated import SimulatedDevice, Storages

CUBLAS, CUBLAS_LT = 32 * MIB, MIB
PROCESSORS, THREADS_OF_PROCESSOR = 132, 2048  # of an H100
THREADS, WARP, VECTOR = 512, 32, 4  # of a block that sums; elements that a thread reads at once
FEWEST, MOST = 16, 256  # values that a thread is to add up
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_ATTENTION_BACKWARD = "_scaled_dot_product_cudnn_attention_backward"


@contextmanager
def kernels_of(device: SimulatedDevice) -> Iterator[None]:
    """A context in which operations on `device` take what an accelerator's do."""
    device.observers.append(Workspaces(device.storages, device.current_stream).computed)
    functions: Any = torch.nn.functional
    chosen = functions.scaled_dot_product_attention
    functions.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functions.scaled_dot_product_attention = chosen


class Workspaces:
    """Memory that operations take besides their results; called after each of them. [Note: workspaces]"""

    def __init__(self, storages: Storages, current_stream: Callable[[], Hashable]) -> None:
        self._storages, self._current_stream = storages, current_stream
        self._kept: set[tuple[str, Hashable, bool]] = set()

    def computed(self, func: Any, args: Any, result: Any = None) -> None:
        name = func._schema.name.partition("::")[2]
        if name in _PRODUCTS:
            self._keep("cuBLAS", CUBLAS)
        if name == "addmm":
            self._keep("cuBLASLt", CUBLAS_LT)
        if name == "sum":
            self._briefly(name, *partial_sums(args))
        if name == _ATTENTION_BACKWARD:
            query: Tensor = args[1]
            self._briefly(name, 4 * query.numel(), 4 * query.numel() // query.shape[-1])

    def _briefly(self, name: str, *sizes: int) -> None:
        for block in [self._storages.take(size, name) for size in sizes]:
            if block is not None:
                self._storages.allocator.free(block)

    def _keep(self, whose: str, size: int) -> None:
        key = whose, self._current_stream(), _torch.in_backward()
        if key not in self._kept:
            self._kept.add(key)
            self._storages.take(size, whose)


def partial_sums(args: Any) -> tuple[int, ...]:
    """Bytes of the partial sums and of the semaphores of their exchange, if a sum with `args` is over the rows of a
    matrix and needs them. [Note: sums over rows]"""
    matrix, dims = args[0], [*args[1]] if len(args) > 1 and isinstance(args[1], (list, tuple)) else []
    if matrix.dim() != 2 or dims != [0] or not matrix.is_contiguous() or matrix.shape[1] % VECTOR:
        return ()
    rows, outputs = matrix.shape
    most = THREADS // VECTOR
    width = min(_power_of_two(outputs // VECTOR, most), WARP)
    height = min(_power_of_two(rows, most), most // width)
    values = rows
    if values < min(height * FEWEST, MOST):  # too few to split them within a block
        return ()
    values = -(-values // height)
    grid = -(-outputs // (VECTOR * width))
    wanted = PROCESSORS * (THREADS_OF_PROCESSOR // (width * height))
    if values < MOST or grid > wanted:
        return ()
    blocks = max(min(-(-wanted // grid), -(-values // FEWEST)), -(-values // MOST))
    return (4 * outputs * blocks * width * VECTOR, 4 * grid) if blocks > 1 else ()


def _power_of_two(number: int, most: int) -> int:
    """The largest power of two up to both."""
    return 1 << (min(number, most).bit_length() - 1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """The fused kernel that `scaled_dot_product_attention` is assumed to choose. [Note: attention]"""
    if options.pop("enable_gqa", False):
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    mixed: Tensor = _torch.fused_attention()(query, key, value, attn_mask, True, dropout_p, is_causal, **options)[0]
    return mixed
