"""What stands between a wrapper and its unit: the root that it keeps, the flat parameters that it lists, and what only
the outermost wrapper may be asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .errors import UsageError
from .root import Root
from .unit import Unit


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
    """The root that `unit` is the outermost unit of; refuses other units."""
    root = unit.root
    if root.unit is not unit:
        raise UsageError(
            f"{method} was called on a nested unit ({type(unit.module).__name__}); call it on the outermost "
            f"FullyShardedDataParallel module ({type(root.unit.module).__name__})"
        )
    root.lazy_init()
    root.settle_down()
    return root


@contextmanager
def no_sync(unit: Unit) -> Iterator[None]:
    """Accumulate without communication; only on the root."""
    with root_of(unit, "no_sync()").no_sync():
        yield
