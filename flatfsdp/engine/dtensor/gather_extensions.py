"""Parameters with gather hooks, maybe inside DTensors of tensor parallelism, as transformed parameters.

The leaf is the master, of which only the shape exists while a unit is unsharded. Modules see the hooks' results for the
gathered tensors, with the leaf behind them in the graph. [Note: gather hooks]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..base import _dtensor
from ..comm.axes import Axis
from ..layout.layout import Part
from ..transforms.extensions import Transform, TransformedParam
from .gather_hooks import GatherHooks, has_gather_hooks, master_of
from .tensor_parallel import StoredDTensor, TensorParallel


@dataclass(frozen=True, eq=False)
class ExtendedParam:
    """A parameter that is stored as the master of a tensor with gather hooks.

    Attributes:
        outer: the DTensor whose local part the tensor was, if it was one.
    """

    hooks: GatherHooks
    outer: StoredDTensor | None


class GatherExtensions(Transform):
    """The transformation of tensors with gather hooks."""

    def __init__(self, parallel: TensorParallel, policy: Any, dims: Mapping[str, int]) -> None:
        """`parallel`: for DTensors that have such tensors inside; `policy`: of mixed precision, an argument of the
        hooks; `dims`: the dimension along which each parameter is split, by its path."""
        self._parallel, self._policy, self._dims = parallel, policy, dims

    def applies(self, parameter: torch.Tensor) -> bool:
        """Whether `parameter`, or this rank's part of it, has gather hooks."""
        return has_gather_hooks(_dtensor.local_of(parameter) if _dtensor.is_dtensor(parameter) else parameter)

    def check(self, path: str, parameter: torch.Tensor) -> None:
        """Refuse a parameter whose hooks, or whose DTensor, are not supported."""
        self._taken(path, parameter)

    def _taken(self, path: str, parameter: torch.Tensor) -> tuple[torch.Tensor, ExtendedParam]:
        tensor, outer = parameter.detach(), None
        if _dtensor.is_dtensor(parameter):
            self._parallel.check(path, parameter)
            tensor, outer = self._parallel.store(path, parameter)
        return tensor, ExtendedParam(GatherHooks(path, tensor, self._policy, self._dims.get(path, 0)), outer)

    def store(self, path: str, parameter: torch.Tensor) -> tuple[torch.Tensor, ExtendedParam]:
        """The master of `parameter`, or of this rank's part of it; a tensor on the meta device if there is none."""
        tensor, state = self._taken(path, parameter)
        return state.hooks.stored_of(tensor), state

    def attach(self, state: ExtendedParam, module: nn.Module, mesh: Any) -> None:
        """Set the `module` that computes with the parameter, and the `mesh` that shards it."""
        state.hooks.attach(module, mesh)
        if _save_masters not in module._state_dict_hooks.values():  # copies have it already
            module.register_state_dict_post_hook(_save_masters)

    def see(self, leaf: torch.Tensor, state: ExtendedParam) -> torch.Tensor:
        """The result of the last gather."""
        seen = state.hooks.seen
        assert seen is not None
        if state.outer is not None:
            seen = _dtensor.dtensor(seen, state.outer.spec(seen.dtype))
        made: torch.Tensor = _Seen.apply(leaf, seen, state.outer)
        return made

    def describe(self, state: ExtendedParam) -> str:
        """The class whose hooks are used, and the placements of its DTensor."""
        outer = "" if state.outer is None else self._parallel.describe(state.outer)
        return f"{outer} gathered by the hooks of {state.hooks.cls.__name__}"

    def can_be_pickled(self, state: ExtendedParam) -> bool:
        """True unless it has a DTensor, which cannot be pickled."""
        return state.outer is None

    def around(self, stored: torch.Tensor, state: ExtendedParam) -> torch.Tensor | None:
        """A tensor of the parameter's class that holds `stored` itself, if it can."""
        if state.hooks.keeps_rows:
            return None
        made = state.hooks.around(stored)
        return made if state.outer is None else self._parallel.around(made, state.outer)

    def stored_in(self, seen: torch.Tensor) -> torch.Tensor:
        """The master of a tensor that `around` made; a replacement of another class itself."""
        if _dtensor.is_dtensor(seen):
            seen = self._parallel.stored_in(seen)
        master = master_of(seen) if has_gather_hooks(seen) else None
        return seen if master is None else master

    def part(self, state: ExtendedParam) -> Part | None:
        """The position of the stored part in the whole, under tensor parallelism."""
        return None if state.outer is None else self._parallel.part(state.outer)

    def assemble(self, stored: torch.Tensor, state: ExtendedParam) -> torch.Tensor:
        """The whole, from all ranks of the DTensor's mesh. Collective over it."""
        assert state.outer is not None
        return self._parallel.assemble(stored, state.outer)

    def axes(self, state: ExtendedParam, device: torch.device) -> list[tuple[Axis, bool]]:
        """The axes of the DTensor's mesh."""
        return [] if state.outer is None else self._parallel.axes(state.outer, device)


def hooks_by_leaf(transformed: Iterable[TransformedParam]) -> dict[int, GatherHooks]:
    """The gather hooks of those parameters that have them, by the ids of their leaves."""
    return {id(each.leaf): each.state.hooks for each in transformed if isinstance(each.state, ExtendedParam)}


def _save_masters(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Save masters as DTensors of plain tensors: reading such files then requires no user-defined class, and they
    contain nothing else, while torch writes all memory behind a tensor of another class."""
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if (
            value is not parameter
            and _dtensor.is_dtensor(value)
            and has_gather_hooks(local := _dtensor.local_of(value))
            and (master := master_of(local)) is not None
        ):
            state_dict[prefix + name] = _dtensor.dtensor(master, _dtensor.spec_of(value))


class _Seen(torch.autograd.Function):
    """The seen form of a leaf, which has no memory; its gradient is the leaf's."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, seen: torch.Tensor, outer: StoredDTensor | None) -> torch.Tensor:
        ctx.outer = outer
        return seen.detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad if ctx.outer is None else ctx.outer.gradient(grad), None, None
