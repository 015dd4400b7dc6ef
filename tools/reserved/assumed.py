"""What operations take from the allocator that no tensor shows: assumptions, each with its reason.

[Note: workspaces] cuBLAS gets a workspace for each of its handles and streams at the first product, and keeps it.
Handles belong to threads: that of the forward, and that in which autograd runs. On Hopper torch takes 32 MiB (its
default, 4096 KiB times 8), and for products with a bias, by cuBLASLt, another of 1 MiB. The allocator's own books on an
H100 say so: after a step the model's code held 33 MiB, and autograd's thread 32 MiB
(`tools/bench_results/gpu/results.json`, "terms").

[Note: attention] Either fused kernel (cuDNN's, which torch prefers on Hopper, and flash attention) saves its output and
a float32 per row, and in the backward adds up the query's gradient in float32, beside a float32 per row. The temporary
memory of other kernels (normalization, sums over rows) is below 1 MiB and left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .allocator import MIB
from .fake_cuda import Memory

CUBLAS, CUBLAS_LT = 32 * MIB, MIB
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_ATTENTION_BACKWARD = "_scaled_dot_product_cudnn_attention_backward"


class Workspaces:
    """Memory that operations take besides their results; called after each of them. [Note: workspaces]"""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._kept: set[tuple[str, Any, bool]] = set()

    def after(self, name: str, args: Any) -> None:
        if name in _PRODUCTS:
            self._keep("cuBLAS", CUBLAS)
        if name == "addmm":
            self._keep("cuBLASLt", CUBLAS_LT)
        if name == _ATTENTION_BACKWARD:
            query: Tensor = args[1]
            for numel in (query.numel(), query.numel() // query.shape[-1]):
                self._memory.give(self._memory.take(4 * numel, name))

    def _keep(self, whose: str, size: int) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        key = whose, self._memory.stream, in_backward
        if key not in self._kept:
            self._kept.add(key)
            self._memory.take(size, whose)


def attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
    """The fused kernel that `scaled_dot_product_attention` is assumed to choose. [Note: attention]"""
    fused = torch.ops.aten._scaled_dot_product_cudnn_attention
    mixed: Tensor = fused(query, key, value, None, True, 0.0, is_causal)[0]
    return mixed
