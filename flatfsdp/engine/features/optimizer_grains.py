"""The grains that suit an optimizer: a value for `layout=`, from its class, before there are parameters to build it on.

[Note: grains of optimizers] An optimizer that sees whole matrices prefers them on one rank each, where it steps on them
without an exchange; one with states in blocks needs cuts between these. An element-wise one needs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import UsageError, refuse_type, refuse_value
from ..flat.layout_views import spec_of
from ..planning.grains import Elements, Grain, Preferred, Rows, Whole, state_blocks
from .matrix_adapters import ADAPTERS, NAMED, Adapter

GrainOf = Callable[[str, nn.Parameter], "Grain | None"]


def is_optimizer(value: object) -> bool:
    """Whether `value` is a class of optimizers, or a `functools.partial` of one."""
    cls = value.func if isinstance(value, partial) else value
    return isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)


def for_optimizer(optimizer: Any, *, sees: str | None = None) -> GrainOf:
    """The grains that suit the steps of an optimizer, as a value for `layout=`, which also takes the class itself.

    - With `matrix_steps`: each matrix of a trainable parameter is `Preferred` on one rank, balanced by the cost of its
      steps. What does not fit within the padding that is worth it is exchanged; `summary` has how many.
    - With `block_states`: `state_blocks` of the optimizer's block size; with bitsandbytes, whose last blocks may be
      smaller, blocks of every parameter of at least `min_8bit_size` elements.

    Args:
        optimizer: a class, or a `functools.partial` of one.
        sees: as for `matrix_steps`, for classes that it does not know.

    Raises:
        ConfigTypeError, ConfigValueError: an argument.
        UsageError: it is not known what the class has to see completely.
    """
    if not is_optimizer(optimizer):
        refuse_type("for_optimizer: optimizer", optimizer, "a class of optimizers, or a functools.partial of one")
    if sees is not None and sees not in NAMED:
        refuse_value("for_optimizer: sees", sees, ", ".join(map(repr, NAMED)))
    cls: Any = optimizer.func if isinstance(optimizer, partial) else optimizer
    settings = optimizer.keywords if isinstance(optimizer, partial) else {}
    adapter = ADAPTERS.get(cls) if sees is None else NAMED[sees]
    if adapter is not None:
        return partial(_preferred, adapter)
    takes = {name: each.default for name, each in inspect.signature(cls).parameters.items()} | settings
    if hasattr(cls, "_subclass_zeros") and "block_size" in takes:
        return state_blocks(takes["block_size"])
    if "min_8bit_size" in takes:
        return partial(_in_blocks, takes["min_8bit_size"])
    raise UsageError(
        f"layout: it is not known what {cls.__module__}.{cls.__qualname__} has to see completely. An element-wise "
        "optimizer needs no layout; for others pass flatfsdp.layout.for_optimizer(..., sees=...), as for matrix_steps, "
        "or grains by name"
    )


def _in_blocks(least: int, name: str, parameter: nn.Parameter) -> Grain | None:
    return Elements(256) if parameter.numel() >= least else None


def _preferred(adapter: Adapter, name: str, parameter: nn.Parameter) -> Grain | None:
    if not parameter.requires_grad or not parameter.numel():
        return None
    try:
        seen = adapter.seen(spec_of(name, parameter))
    except UsageError:  # it is for another optimizer
        return None
    return Preferred(Whole(cost=adapter.cost) if len(seen) == 1 else Rows())
