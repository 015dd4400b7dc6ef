"""An objective that never has all logits in memory: head and cross entropy are computed in chunks of rows.

[Note: chunks] The logits of a chunk are computed, used for the loss and, where needed, for its gradient, and dropped,
all in the forward, so that nothing is computed twice. The backward needs tensors of the sizes of the hidden states and
of the weight, which are needed for the gradients in any case.

[Note: heads] Models do not declare which layer computes their logits, nor whether they scale or cap them afterwards. So
a model runs twice on a tiny input: first to find the linear layer whose output has the shape of the logits, then with a
number in place of that output, which has to be returned unchanged. In training, the loss takes the place of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from flatfsdp.errors import FlatFSDPError, UsageError
from flatfsdp.trainer.model.fronts import class_of
from flatfsdp.trainer.model.hugging_face import takes_input_ids
from flatfsdp.trainer.model.sharding import is_recomputed
from flatfsdp.trainer.objectives import CausalLM, Objective, call, check_fit, evaluating, logits_of
from flatfsdp.trainer.process_group import warn_for_all

LEAST_ROWS = 256  # of a chunk: fewer would leave an accelerator idle
_NUMBER = 12345.678  # changed by every cap or scale, and by a dtype with less precision than a loss needs


def fused(objective: Objective, model: nn.Module, *, example: Any = None, rows: int | None = None) -> Objective:
    """`objective` with head and cross entropy of `model` in chunks of rows: logits are never in memory all at once.

    For `CausalLM`, and any model whose logits are the unchanged output of an `nn.Linear`, tied or not; the model needs
    no special method. That layer is found in two forwards without gradients, so call this after sharding, on all ranks.
    If there is no such layer, it warns with the reason, and returns `objective` unchanged.

    Args:
        objective: the objective to compute.
        model: the sharded model; the objective returned is for this one, and does not keep it alive.
        example: a small batch for those forwards, of the same size on all ranks; None for two tokens.
        rows: tokens of a chunk; None for a number whose logits are about as large as the hidden states.

    Values and gradients are those of `objective`, except for the order of sums. A loss has only one backward.
    """
    try:
        if not isinstance(objective, CausalLM):
            raise NoHeadError(f"a {type(objective).__name__} is not known to be the cross entropy of a linear layer")
        batch = _two_tokens(model) if example is None else example
        head = find_head(model, lambda: logits_of(call(model, batch)))
    except NoHeadError as reason:
        warn_for_all(f"fused_loss has no effect, and the full logits will be in memory: {reason}")
        return objective
    return _FusedCausalLM(objective, ref(head), rows)


@dataclass(frozen=True)
class _FusedCausalLM:
    """`CausalLM` whose loss is computed inside the model's call of its head, where the head is gathered as usual."""

    objective: CausalLM
    head: ref[nn.Linear]
    rows: int | None
    has_perplexity: ClassVar[bool] = True

    def weight(self, batch: Any) -> int:
        return self.objective.weight(batch)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        head, targets = self.head(), self.objective.targets(batch)
        if head is None or all(each is not head for each in model.modules()):
            raise UsageError("fused: this objective is for another model; call fused(objective, model) with this one")

        def total(hidden: Tensor) -> Tensor:
            check_fit(hidden, targets, model)
            return linear_cross_entropy(
                hidden,
                head.weight,
                head.bias,
                targets.to(hidden.device),
                ignore_index=self.objective.ignore_index,
                rows=self.rows,
            )

        with in_place_of_head(head, total):
            return logits_of(call(model, batch))


def _two_tokens(model: nn.Module) -> Any:
    device = next((parameter.device for parameter in model.parameters()), None)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    return {"input_ids": tokens} if takes_input_ids(model) else tokens


class NoHeadError(Exception):
    """There is no layer whose output can be replaced; the message is the reason."""


def find_head(model: nn.Module, logits: Callable[[], Tensor]) -> nn.Linear:
    """The linear layer whose output is the logits of `model`. Collective: runs the model twice, without gradients.

    Args:
        model: the model, sharded or not.
        logits: runs it on a small input and returns its logits.

    Raises:
        NoHeadError: there is none, or its output is changed before it is returned.
    """
    names = {module: name for name, module in model.named_modules()}
    with evaluating(model), torch.no_grad():
        calls: list[tuple[nn.Linear, torch.Size]] = []
        hooks = [
            module.register_forward_hook(lambda module, _, output: calls.append((module, output.shape)))
            for module in names
            if class_of(module) is nn.Linear  # a subclass may compute something else
        ]
        try:
            shape = _tried(logits).shape
        finally:
            for hook in hooks:
                hook.remove()
        fitting = [module for module, found in calls if found == shape]
        if not fitting:
            raise NoHeadError(f"no nn.Linear of {type(model).__name__} returns anything of the shape of its logits")
        head = fitting[-1]
        if sum(module is head for module, _ in calls) > 1:
            raise NoHeadError(f"{names[head]!r} is called more than once")
        with in_place_of_head(head, lambda hidden: torch.tensor(_NUMBER, device=hidden.device)):
            found = _tried(logits)
    if found.dim() or found.dtype != torch.float32 or found.item() != torch.tensor(_NUMBER).item():
        raise NoHeadError(f"the output of {names[head]!r} is changed (scaled, capped, cast) before it is returned")
    for module, name in names.items():
        if module is not head and is_recomputed(module) and head in set(module.modules()):
            raise NoHeadError(
                f"{names[head]!r} is inside {name!r}, which is recomputed in the backward pass, without the fused loss"
            )
    return head


@contextmanager
def in_place_of_head(head: nn.Linear, replacement: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, calls of `head` call `replacement`, with parameters gathered as for its own forward."""
    own: Any = head.__dict__.get("forward")
    head.forward = replacement  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward
        if own is not None:
            head.forward = own  # type: ignore[method-assign]


def _tried(logits: Callable[[], Tensor]) -> Tensor:
    try:
        return logits()
    except FlatFSDPError:
        raise
    except Exception as error:
        raise NoHeadError(
            f"a trial forward failed (another example= may help): {type(error).__name__}: {error}"
        ) from error


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    rows: int | None = None,
) -> Tensor:
    """`cross_entropy(linear(hidden, weight, bias), targets, reduction="sum")`, with one chunk of logits at a time.

    Args:
        hidden: (..., features), floating-point.
        weight: (classes, features), of the same dtype.
        bias: (classes,), or None.
        targets: as many as rows of `hidden`, int64: classes, or `ignore_index` for rows that do not count.
        ignore_index: marks rows without a target.
        rows: of a chunk; None for a number whose logits are about as large as `hidden`, at least 256.

    Returns the sum over all rows that count, fp32 without dimensions. It has only one backward; gradients of the weight
    are summed in fp32 over chunks.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    if rows is None:
        rows = max(LEAST_ROWS, -(-flat.numel() // weight.shape[0]))
    if not torch.is_grad_enabled():  # a Function's forward cannot see this
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
            normalizer = torch.logsumexp(logits, 1)
            total += (normalizer - logits.gather(1, index)[:, 0]).where(counts, 0).sum()
            if not (of_hidden or of_weight or of_bias):
                continue
            # The gradient of a row of logits: its softmax, minus one at its target.
            slope = logits.sub_(normalizer[:, None]).exp_()
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
        # In place: memory is scarce here. A second backward fails for this reason.
        scaled = (None if each is None else each.mul_(gradient) for each in ctx.saved_tensors)
        found = (None if each is None else each.to(dtype) for each, dtype in zip(scaled, ctx.dtypes, strict=True))
        return *found, None, None, None
