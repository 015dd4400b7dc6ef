"""Before an optimizer steps: its models come to rest, and one that holds what it cannot step is told so.

One global pre-step hook of torch.optim serves all optimizers; after an optimizer's first step it costs a look at the
set of live models.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import registry
from .errors import UsageError
from .stepping import is_at_work

# The registry's generation at which an optimizer was last checked.
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_installed = False


def guard_optimizers() -> None:
    """Install the hook, once per process."""
    global _installed
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if is_at_work(optimizer):
        return
    bring_to_rest(optimizer)
    if _checked.get(optimizer) != registry.generation:
        check_parameters(optimizer)
        _checked[optimizer] = registry.generation


def bring_to_rest(optimizer: torch.optim.Optimizer) -> None:
    """Let models that `optimizer` steps show shards and gradients, as between iterations."""
    busy = [root for root in registry.roots if not root.shows_shards]
    if busy:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for root in busy:
            handles = (handle for unit in root.units for handle in unit.handles)
            if any(id(parameter) in stepped for handle in handles for parameter in handle.steppable):
                root.show_shards()


def check_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that holds parameters which it could not step as they are.

    Raises:
        UsageError: they were flattened, or its state is from before wrapping.
    """
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            unit = registry.owner_of(parameter)
            if unit is None:
                continue
            handle = next(h for h in unit.handles if any(leaf is parameter for leaf in h.leaves))
            index = next(i for i, leaf in enumerate(handle.leaves) if leaf is parameter)
            spec = handle.layout.params[index]
            where = f"parameter {spec.name!r} of unit {unit.label} (param group {number})"
            if not handle.use_orig_params:
                raise UsageError(
                    f"the optimizer holds {where}, which was flattened: with use_orig_params=False it would never be "
                    "updated. Build the optimizer "
                    "from model.parameters() after wrapping, or wrap with use_orig_params=True"
                )
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                    raise UsageError(
                        f"the optimizer has state from before wrapping: {key!r} of {where} has shape "
                        f"{tuple(value.shape)}, but this rank's shard of it "
                        f"has {tuple(parameter.shape)}. Build the optimizer after wrapping, or wrap before its first "
                        "step"
                    )
