"""The last linear layer and its cross entropy in chunks of rows: logits of all tokens are never in memory together.

[Note: chunks] A chunk's logits are made, read for the loss and, where one is wanted, for its gradient, and dropped: in
the forward, so that nothing is computed twice. What is kept for the backward has the size of the hidden states and of
the layer's weight, which its gradient takes anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

LEAST_ROWS = 256  # of a chunk: fewer would keep an accelerator waiting


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    rows: int | None = None,
) -> Tensor:
    """`cross_entropy(linear(hidden, weight, bias), targets, reduction="sum")`, never more than a chunk of it at a time.

    Args:
        hidden: (..., features), floating-point.
        weight: (classes, features), of the same dtype.
        bias: (classes,), or None.
        targets: as many as rows of `hidden`, int64: classes, or `ignore_index` where nothing counts.
        ignore_index: marks rows without a target.
        rows: of a chunk; None for so many that its logits are about as large as `hidden`, but not fewer than 256.

    Returns the sum over all rows that count, fp32 without dimensions. It has one backward; gradients of the weight add
    up in fp32 over chunks.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    if rows is None:
        rows = max(LEAST_ROWS, -(-flat.numel() // weight.shape[0]))
    if not torch.is_grad_enabled():  # which a Function's forward does not see
        flat, weight, bias = flat.detach(), weight.detach(), None if bias is None else bias.detach()
    total: Tensor = _LinearCrossEntropy.apply(flat, weight, bias, targets.reshape(-1), ignore_index, rows)
    return total


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, rows: int
    ) -> Tensor:
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        for_hidden = torch.empty_like(hidden) if of_hidden else None
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        for_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and of_bias else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            chunk, wanted = hidden[start : start + rows], targets[start : start + rows]
            counts = wanted != ignore_index
            index = wanted.where(counts, 0)[:, None]
            logits = F.linear(chunk, weight, bias).float()
            normaliser = torch.logsumexp(logits, 1)
            total += (normaliser - logits.gather(1, index)[:, 0]).where(counts, 0).sum()
            if not (of_hidden or of_weight or of_bias):
                continue
            # The gradient of a row of logits: its softmax, less one at its target.
            slope = logits.sub_(normaliser[:, None]).exp_()
            slope.scatter_add_(1, index, slope.new_full(index.shape, -1.0)).mul_(counts[:, None])
            if for_bias is not None:
                for_bias += slope.sum(0)
            slope = slope.to(hidden.dtype)
            if for_hidden is not None:
                torch.mm(slope, weight, out=for_hidden[start : start + rows])
            if for_weight is not None and for_weight.dtype == slope.dtype:
                for_weight.addmm_(slope.T, chunk)
            elif for_weight is not None:
                for_weight += slope.T @ chunk
        ctx.save_for_backward(for_hidden, for_weight, for_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # In place: there is no memory to spare here. A second backward would notice, and fail.
        scaled = (None if each is None else each.mul_(gradient) for each in ctx.saved_tensors)
        found = (None if each is None else each.to(dtype) for each, dtype in zip(scaled, ctx.dtypes, strict=True))
        return *found, None, None, None
