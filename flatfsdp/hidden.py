"""A parameter that does not show its value, and says so where it is used.

[Note: hidden] Between a forward that resharded and the backward a leaf has no elements; in a forward, and until its
backward, the leaf of a unit that has not run shows this rank's shard. A term over `model.parameters()` would then be
zero, or another one on each rank, without a word, and its gradient of a shape that autograd refuses in words of its
own. So for that time the leaf is of a class whose operations refuse. It stays the same object, a `Parameter`, and what
only asks about it (shape, `.grad`, `requires_grad`, hooks) is answered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .errors import UsageError
from .flat_param import FlatParamHandle
from .placeholder import ASKS


class HiddenParameter(nn.Parameter):
    """What `nn.Parameter` objects are while they do not show their value; never constructed."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in ASKS:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise UsageError(_refusal(getattr(func, "__name__", str(func)), (*args, *(kwargs or {}).values())))


def hide(leaves: Iterable[nn.Parameter], nothing: torch.Tensor) -> None:
    """Let `leaves` show `nothing`, unless they do, and refuse operations on them; those of users' own classes stay what
    they are."""
    for leaf in leaves:
        kind = type(leaf)
        if kind is not HiddenParameter:
            leaf.data = nothing
            if kind is nn.Parameter:
                leaf.__class__ = HiddenParameter


def _hidden_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if type(value) is HiddenParameter:
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _hidden_in(value)


# Whose leaves may be hidden: asked for names only when one was used.
_handles: weakref.WeakSet[FlatParamHandle] = weakref.WeakSet()


def may_hide(handle: FlatParamHandle) -> None:
    """The leaves of `handle` will be hidden: errors look for their names there."""
    _handles.add(handle)


def _refusal(operation: str, arguments: Iterable[Any]) -> str:
    used = {id(leaf) for leaf in _hidden_in(arguments)}
    named = [
        f"{spec.name!r} of unit {handle.name or '<root>'!r}"
        for handle in _handles
        for leaf, spec in zip(handle.leaves, handle.layout.params, strict=True)
        if id(leaf) in used
    ]
    return (
        f"{operation}() reads parameter {', '.join(named) or '(unnamed)'} outside the forward of its unit, in a "
        "forward of the model or between it and its backward, where it is sharded. Use it in the forward of the module "
        "that holds it (a term over parameters, an L2 penalty say, too), call unshard() of that unit's wrapper before, "
        "or let the unit be the module that uses it; to look at values, use summon_full_params() between steps"
    )
