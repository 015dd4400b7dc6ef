"""Registration of communication hooks, with the checks of model and time; a reducer of `comm` calls the hook.
[Note: communication hooks]"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import UsageError, refuse_type
from ..config.unit_options import CommHook
from ..runtime.model import check_outermost
from ..runtime.rest import check_outside, quiesce
from ..runtime.unit import Unit


def register_comm_hook(unit: Unit, state: Any, function: Callable[..., Any]) -> None:
    """Replace the reductions of all units by a user-defined hook; only on the outermost wrapper."""
    method = "register_comm_hook()"
    if not callable(function):
        refuse_type("register_comm_hook: hook", function, "a callable (state, grad) or (state, grad, shard)")
    check_outside(unit, method)
    model = check_outermost(unit, method)
    quiesce([unit], collective=False, shards=False)
    for each in model.units:
        _check_hookable(each, method)
    hook = CommHook.of(state, function)
    for each in model.units:
        model.setup.set_options(each, comm_hook=hook)
        if model.setup.ready:
            model.setup.connect(each)


def _check_hookable(unit: Unit, method: str) -> None:
    if unit.options.comm_hook is not None:
        problem = "it already has one. Register a single hook for the whole life of the model, on its outermost wrapper"
    elif any(grads.accumulation.pending for grads in unit.grads):
        problem = "gradients have accumulated that are not reduced yet. First run a backward that reduces them"
    elif unit.built.mixed_precision.reduce_bits is not None:
        bits = unit.built.mixed_precision.reduce_bits
        problem = (
            f"MixedPrecision(reduce_bits={bits}) determines how its gradients are sent, but a hook sends them itself. "
            "Use only one of the two"
        )
    elif unit.options.schedule.divide_by is not None:
        problem = (
            "set_gradient_divide_factor() was called, but a hook scales gradients itself. Divide in the hook instead"
        )
    elif unit.groups.shard.size == 1 and unit.built.traits.shards and unit.groups.replicate is not None:
        problem = "its shard group, over which a hook reduces, contains only this rank. Use NO_SHARD over the replicas"
    else:
        return
    raise UsageError(f"{method} of unit {unit.label}: {problem}")
