"""The linear layer that makes a model's logits: found by trying, and replaced for the time of a forward.

[Note: heads] Models do not declare where their logits come from, nor whether they scale or cap them afterwards. So a
model runs twice on next to nothing: once to see which linear layer's output has the shape of the logits, once with a
number in that output's place, which has to come out as it went in. What is put there in training is a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.errors import FlatFSDPError
from flatfsdp.trainer.model.recomputation import is_recomputed

_NUMBER = 12345.678  # no cap and no scale leaves it alone, nor a dtype with less precision than a loss needs


class NoHeadError(Exception):
    """There is no layer whose output could be replaced; its text is the reason."""


def find_head(model: nn.Module, logits: Callable[[], Tensor]) -> nn.Linear:
    """The linear layer whose output the logits of `model` are. Collective: runs the model twice, without gradients.

    Args:
        model: the model, sharded or not.
        logits: runs it on something small and returns its logits.

    Raises:
        NoHeadError: there is none, or something comes after it.
    """
    names = {module: name for name, module in model.named_modules()}
    with _evaluating(model), torch.no_grad():
        calls: list[tuple[nn.Linear, torch.Size]] = []
        hooks = [
            module.register_forward_hook(lambda module, _, output: calls.append((module, output.shape)))
            for module in names
            if type(module) is nn.Linear  # what derives from it may compute something else
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
        raise NoHeadError(f"what {names[head]!r} returns is changed (scaled, capped, cast) before it is returned")
    for module, name in names.items():
        if module is not head and is_recomputed(module) and head in set(module.modules()):
            raise NoHeadError(
                f"{names[head]!r} is inside {name!r}, which is computed again in the backward, then as it is"
            )
    return head


@contextmanager
def in_place_of_head(head: nn.Linear, replacement: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Calling `head` calls `replacement` inside, with its parameters there as for its own forward."""
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
            f"a forward to try failed (another example= may help): {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode, which draws no random numbers and follows no statistics; each module is as it was afterwards."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was
