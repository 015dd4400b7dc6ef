"""The norm of all gradients of a model, whatever holds them, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import nn

from .errors import ConfigTypeError, ConfigValueError, NonFiniteError, UsageError, refuse_type, warn
from .nonfinite import first_gradient, of_all_ranks
from .root import Root


def _power_sum(grads: Iterable[torch.Tensor], p: float, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The sum of |g|^p over `grads` (the maximum of |g| for p = inf; the number of non-zeros for p = 0), in `dtype`."""
    total = torch.zeros((), dtype=dtype, device=device)
    for grad in grads:
        norm = torch.linalg.vector_norm(
            grad.detach().to_dense() if grad.is_sparse else grad.detach(), p, dtype=dtype
        ).to(device)
        if math.isinf(p):
            total = torch.maximum(total, norm)
        else:
            total = total + (norm if p == 0 else norm**p)
    return total


@torch.no_grad()
def clip_grad_norm(
    root: Root, model: nn.Module, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale all gradients of `model` so that their joint norm is at most `max_norm`; returns the norm before.

    A sharded gradient counts once over its shard group, one that every rank holds (NO_SHARD, ignored parameters) once.
    Collective over the shard groups: one scalar each, present gradients or not. A norm that is not finite is that on
    all ranks, which with `error_if_nonfinite` go on to tell each other which gradient it is.
    """
    if not isinstance(error_if_nonfinite, bool):
        refuse_type("error_if_nonfinite", error_if_nonfinite, "True or False")
    if root.steppers.active:
        raise UsageError(
            f"clip_grad_norm_: {root.steppers.active[0].name} steps in backwards, so that gradients are gone before "
            "their norm is known. Run the backward, the clipping and the optimizer's own step() inside no_step() of "
            "what optimizer_in_backward() returned, or clip each gradient by itself, in a post-accumulate hook"
        )
    if not isinstance(max_norm, (int, float)) or isinstance(max_norm, bool):
        raise ConfigTypeError(f"max_norm: got {max_norm!r}. Accepted: a number")
    try:
        p = float(norm_type)
    except (TypeError, ValueError):
        raise ConfigTypeError(f"norm_type: got {norm_type!r}. Accepted: a number, or 'inf'") from None
    if math.isnan(p) or p < 0:
        raise ConfigValueError(f"norm_type: got {norm_type!r}. Accepted: 0, a positive number, or inf")
    device = root.device.device
    sharded: dict[int, list[torch.Tensor]] = {}
    axes = {}
    whole: list[torch.Tensor] = []
    managed: set[int] = set()
    dtypes: set[torch.dtype] = set()  # of the gradients on any rank, also where this one holds none of a kind
    for unit in root.units:
        for handle in unit.handles:
            managed.update(id(leaf) for leaf in handle.leaves)
            managed.add(id(handle.flat_param))
            grads = [parameter.grad for parameter in handle.steppable if parameter.grad is not None]
            if any(leaf.requires_grad for leaf in handle.leaves):
                dtypes.add(handle.precision.grad)
            if handle.whole:
                whole.extend(grads)
            else:
                key = id(unit.groups.shard.process_group)
                axes[key] = unit.gather
                sharded.setdefault(key, []).extend(grads)
    whole.extend(p.grad for p in model.parameters() if id(p) not in managed and p.grad is not None)
    dtypes.update(grad.dtype for grad in whole)
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    total = _power_sum(whole, p, device, wide)
    for key, grads in sharded.items():
        part = _power_sum(grads, p, device, wide)
        if math.isinf(p):  # backends' maximum may lose a NaN
            total = torch.maximum(total, axes[key].gather_now(part).amax())
        else:
            total = total + axes[key].all_reduce_now(part)
    norm = total if math.isinf(p) or p == 0 else total ** (1.0 / p)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        _refuse_norm(root, norm, p)
    every = [grad for grads in sharded.values() for grad in grads] + whole
    if not every:
        warn(
            f"clip_grad_norm_: no parameter of rank {root.unit.groups.shard.rank} has a gradient; the norm counts only "
            "other ranks' gradients"
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in every:
        grad.mul_(scale.to(grad.device))  # of no dimension: computed in its precision, kept in the gradient's dtype
    return norm.to(max(dtypes, key=lambda d: d.itemsize)) if dtypes else norm


def _refuse_norm(root: Root, norm: torch.Tensor, p: float) -> NoReturn:
    told = of_all_ranks(first_gradient(root.units), root.agreement, root.units)
    raise NonFiniteError(
        f"clip_grad_norm_: the norm of order {p:g} of all gradients is {float(norm)}: "
        f"{told or 'each gradient of the units is finite, so it is that of parameters outside of them, or too large'}. "
        "No gradient was changed"
    )
