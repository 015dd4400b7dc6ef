"""What stands between a wrapper and its unit: the root that it keeps, the flat parameters that it lists, and what only
the outermost wrapper may be asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...errors import UsageError, refuse_type
from ..config.unit_options import CommHook
from ..runtime.model import Root
from ..runtime.module_tree import check_outermost
from ..runtime.rest import check_outside, initialize, quiesce
from ..runtime.unit import Unit


def keep_root(wrapper: nn.Module, unit: Unit) -> None:
    """Let `wrapper` keep the root that was made over its `unit` alive, and with the root all units."""
    wrapper.__dict__["_kept_root"], unit.own_root = unit.own_root, None


def register_flat_params(wrapper: nn.Module, unit: Unit) -> None:
    """With `use_orig_params=False`, list the flat parameters as the wrapper's own."""
    for kind, handle in enumerate(unit.handles):
        if not handle.use_orig_params:
            wrapper._parameters["_flat_param" if kind == 0 else f"_flat_param_{kind}"] = handle.flat_param


@contextmanager
def flat_params_hidden(module: nn.Module) -> Iterator[None]:
    """No flat parameter among `module.parameters()`: the whole ones are listed instead."""
    wrappers = [m for m in module.modules() if isinstance(m.__dict__.get("_unit"), Unit)]
    for wrapper in wrappers:
        for name in [name for name in wrapper._parameters if name.startswith("_flat_param")]:
            del wrapper._parameters[name]
    try:
        yield
    finally:
        for wrapper in wrappers:
            register_flat_params(wrapper, wrapper.__dict__["_unit"])


def root_of(unit: Unit, method: str) -> Root:
    """The root that `unit` is the outermost unit of, initialised; refuses other units."""
    check_outermost(unit, method)
    initialize(unit.root)
    return unit.root


@contextmanager
def no_sync(unit: Unit) -> Iterator[None]:
    """Accumulate without communication; only on the root."""
    with root_of(unit, "no_sync()").no_sync():
        yield


def register_comm_hook(unit: Unit, state: Any, function: Callable[..., Any]) -> None:
    """Let a user's hook do what the reductions of all units do; only on the root."""
    method = "register_comm_hook()"
    if not callable(function):
        refuse_type("register_comm_hook: hook", function, "a callable (state, grad) or (state, grad, shard)")
    check_outside(unit, method)
    check_outermost(unit, method)
    root = unit.root
    quiesce([unit], collective=False, shards=False)
    for each in root.units:
        _check_hookable(each, method)
    hook = CommHook.of(state, function)
    for each in root.units:
        each.set_options(comm_hook=hook)
        if root.ready:
            root.connect(each)


def _check_hookable(unit: Unit, method: str) -> None:
    if unit.options.comm_hook is not None:
        problem = "it has one already. Register one for the whole life of the model, on its outermost wrapper"
    elif any(grads.accumulation.pending for grads in unit.grads):
        problem = "gradients accumulate, not reduced yet. Run a backward that reduces them first"
    elif unit.options.schedule.divide_by is not None:
        problem = "set_gradient_divide_factor() was called, but a hook scales gradients itself. Divide there instead"
    elif unit.groups.shard.size == 1 and unit.traits.shards and unit.groups.replicate is not None:
        problem = "its shard group, over which a hook reduces, is this rank alone. Use NO_SHARD over the replicas"
    else:
        return
    raise UsageError(f"{method} of unit {unit.label}: {problem}")
