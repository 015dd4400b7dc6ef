"""Stand-ins for a module's parameters while its state dict is made or loaded.

[Note: placeholders] Modules make and load their state dicts themselves: they may have hooks that rename, and methods of
their own. To avoid a gather for that, modules hold *placeholders* meanwhile: parameters with the shape, dtype and
device of the unsharded ones, and without memory. In a state dict made by a module, a placeholder marks which parameter
belongs there. When a state dict is loaded, a `copy_` into a placeholder is recorded and later applied to the shard. Any
other operation of a module reads values, which a placeholder does not have: it raises `PlaceholderReadError`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ....errors import UsageError
from ...flat.param_refs import ParamRef, enlist, unlist
from ...guards.param_guard import is_query, name_of
from ...runtime.unit import Unit
from ..named_param import NamedParam, params_of


class PlaceholderReadError(UsageError):
    """An operation on a placeholder needs the parameter's values."""


class Placeholder(nn.Parameter):
    """Holds a parameter's place in a module.

    Attributes:
        leaf: the parameter that it stands for.
        received: the tensor that was copied into it; None if none was.
    """

    stands_in = True  # for a parameter that users have not replaced
    leaf: nn.Parameter
    received: torch.Tensor | None
    _receives: bool

    @staticmethod
    def of(
        leaf: nn.Parameter, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, receives: bool
    ) -> Placeholder:
        """A placeholder for `leaf`, which is unsharded of this shape; `receives`: whether `copy_` into it is kept."""
        nothing = torch.empty((), dtype=dtype, device=device).expand(tuple(shape))  # all its elements share one
        made = Placeholder(nothing, requires_grad=leaf.requires_grad)
        made.leaf = leaf
        made.received = None
        made._receives = receives
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if is_query(func):
            return super().__torch_function__(func, types, args, kwargs or {})
        name = getattr(func, "__name__", "")
        target = args[0] if args else None
        if name == "detach":
            return target
        if name == "copy_" and isinstance(target, Placeholder) and target._receives:
            if type(args[1]) is not Placeholder:  # a placeholder's value has another source
                target.received = args[1]
            return target
        raise PlaceholderReadError(
            f"{name_of(func)} of a parameter whose state dict is being created or loaded: its values cannot be read "
            "now. Call state_dict() or load_state_dict() of the wrapper that contains it, which lets modules read its "
            "values"
        )


# By the id of the leaf: modules of several units share the placeholder of a shared parameter.
_standing: weakref.WeakValueDictionary[int, Placeholder] = weakref.WeakValueDictionary()


class Placeholders:
    """Placeholders for all parameters that modules of one unit hold, its own and shared ones, or `within` one module.

    Attributes:
        unit: the unit whose modules hold them.
    """

    def __init__(self, unit: Unit, *, receives: bool, within: nn.Module | None = None) -> None:
        self.unit = unit
        self._replaced: list[tuple[ParamRef, bool, Any]] = []  # the replaced object, and whether it was registered
        self._placeholders: dict[int, Placeholder] = {}
        flat = unit.flat_refs
        self._hidden = unlist(each for each in flat if within is None or each.module is within)
        owned = {id(each.leaf): each for each in params_of((unit, *unit.owning_units))}
        for param_ref in (*unit.param_refs, *unit.shared_refs):
            if within is not None and param_ref.module is not within:
                continue
            placeholder = _standing.get(id(param_ref.leaf))
            if placeholder is None:
                placeholder = _made(param_ref.leaf, owned[id(param_ref.leaf)], receives=receives)
                _standing[id(param_ref.leaf)] = self._placeholders[id(param_ref.leaf)] = placeholder
            registered = param_ref.attribute in param_ref.module._parameters
            self._replaced.append((param_ref, registered, param_ref.current))
            param_ref.module.__dict__.pop(param_ref.attribute, None)
            param_ref.module._parameters[param_ref.attribute] = placeholder

    def remove(self) -> dict[int, torch.Tensor]:
        """Restore the replaced objects; returns the values that parameters have received, or that were assigned in
        their place, by the id of the leaf."""
        received = {key: each.received for key, each in self._placeholders.items() if each.received is not None}
        for param_ref, registered, before in reversed(self._replaced):
            now = param_ref.module._parameters.get(param_ref.attribute)
            if now is not None and type(now) is not Placeholder:
                received[id(param_ref.leaf)] = now.detach()
            if registered:
                param_ref.module._parameters[param_ref.attribute] = before  # at its position among the others
            else:
                param_ref.module._parameters.pop(param_ref.attribute, None)
                param_ref.module.__dict__[param_ref.attribute] = before
        self._replaced.clear()
        enlist(self._hidden)
        for key in self._placeholders:
            _standing.pop(key, None)
        self._placeholders.clear()
        return received


def placeholder_for(leaf: nn.Parameter, owning_units: Iterable[Unit]) -> Placeholder:
    """A placeholder for `leaf`, which one of `owning_units` owns; it receives nothing."""
    owned = next(each for each in params_of(owning_units) if each.leaf is leaf)
    return _made(leaf, owned, receives=False)


def _made(leaf: nn.Parameter, param: NamedParam, *, receives: bool) -> Placeholder:
    handle = param.handle
    return Placeholder.of(
        leaf, handle.layout.params[param.index].whole.shape, handle.precision.master, handle.device, receives=receives
    )
