"""Parameters that stay unsharded between a forward and its backward.

[Note: left unsharded] Pure queries of such a parameter (shape, dtype, device) are answered for this rank's shard, as
before the forward and after the backward, so that the number of elements is the same at any time. Computation uses the
unsharded parameter, which has its place in the graph. On an axis of one rank, if the unsharded parameter is a copy of
the shard in another dtype or on another device, computation uses the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..base import _torch
from . import param_guard as guard
from .deferred_grad import DeferredGradParameter
from .placeholder import is_query, property_of
from .write_tracker import TracksWrites


class _LeftUnsharded(guard.DescribedAsShard):
    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if _torch.is_tracing():  # compilers see the actual tensor
            return super(guard.DescribedAsShard, cls).__torch_function__(func, types, args, kwargs or {})
        return cls._answer(func, types, args, kwargs or {})

    @classmethod
    def _answer(cls, func: Callable[..., Any], types: Sequence[type], args: Any, kwargs: dict[str, Any]) -> Any:
        return super().__torch_function__(func, types, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))


class UnshardedParameter(guard.CopiedAsOriginal, TracksWrites, _LeftUnsharded):
    """The class of `nn.Parameter` objects that show the unsharded form left by a forward; never constructed."""


class CastParameter(_LeftUnsharded):
    """The class of `nn.Parameter` objects that show a copy of the shard on an axis of one rank; never constructed."""

    @classmethod
    def _answer(cls, func: Callable[..., Any], types: Sequence[type], args: Any, kwargs: dict[str, Any]) -> Any:
        if property_of(func) == "data" and guard.has_handle(args[0]):
            return guard.data_of_shard(*args)
        if (
            is_query(func)
            or func in _OF_AUTOGRAD
            or guard.leads_to_accumulator(func, args)
            or _is_refused_by_autograd(func)
        ):
            return super()._answer(func, types, args, kwargs)
        return guard.call_with_shards(func, args, kwargs, of=CastParameter, shard=_shard)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A parameter of the shard."""
        if id(self) not in memo:
            copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
            copied.__class__ = guard.ORIGINAL[type(self)]
            vars(copied).update(vars(self))
        return memo[id(self)]


def _is_refused_by_autograd(func: Callable[..., Any]) -> bool:
    """Whether `func` works in place, which autograd refuses for a leaf that requires a gradient."""
    name = getattr(func, "__name__", "")
    return torch.is_grad_enabled() and name.endswith("_") and not name.endswith("__")


_OF_AUTOGRAD = (torch.autograd.grad, torch.autograd.backward)

LEFT_WHOLE, LEFT_CAST = guard.ClassVariants(UnshardedParameter), guard.ClassVariants(CastParameter)
LEFT_WHOLE[DeferredGradParameter], LEFT_CAST[DeferredGradParameter] = UnshardedParameter, CastParameter


def _shard(leaf: nn.Parameter) -> torch.Tensor:
    if not guard.has_handle(leaf):  # its model is gone
        with _torch.as_plain_tensors():
            return leaf.detach()
    shard = guard.shard_of(leaf)
    if not (leaf.requires_grad and torch.is_grad_enabled()):
        return shard
    shown = guard.handle_and_index_of(leaf)[0].unsharded.flat
    with _torch.as_plain_tensors():
        computed: torch.Tensor = _Shard.apply(leaf, shard, shown.device, shown.dtype)
    return computed


class _Shard(torch.autograd.Function):
    """The shard of a parameter; its gradients go to the parameter, in the shape and dtype that it shows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(leaf: nn.Parameter, shard: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return shard.view_as(shard)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.shown = inputs[2:]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.to(*ctx.shown), None, None, None
