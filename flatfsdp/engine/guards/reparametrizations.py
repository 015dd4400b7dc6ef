"""Reparametrizations of torch.nn.utils (`prune`, `weight_norm`, parametrizations), which are refused for parameters
that are sharded already.

All let a module list its parameter under another name, or others instead, and compute with a function of these. Units
find the parameters of modules by name, and with flat parameters modules list none, although torch expects them: its
functions would fail after a part of their changes. If torch calls no hook before these changes, the function is
wrapped.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ...errors import UsageError
from ..models.param_registry import owner_of, unit_around
from ..runtime.entries import plain_class

_SUFFIX = "_orig"
_ENDS = (_SUFFIX, "_g", "_v")  # of the names of parameters from which the value of a reparametrized one is computed
_installed = False

# Functions of a module and a name, or methods of a hook and a module: their namespace, their attribute, their name in
# messages. Programs that imported `spectral_norm`, `orthogonal` or `remove_parametrizations` by name before get torch's
# errors, if the shard has another shape.
_FUNCTIONS: tuple[tuple[Any, str, str], ...] = (
    (WeightNorm, "apply", "weight_norm"),
    (SpectralNorm, "apply", "spectral_norm"),
    (parametrize, "register_parametrization", "parametrize"),
    (parametrizations, "spectral_norm", "parametrizations.spectral_norm"),
    (parametrizations, "orthogonal", "parametrizations.orthogonal"),
    (parametrize, "remove_parametrizations", "parametrize.remove_parametrizations"),
    (WeightNorm, "remove", "remove_weight_norm"),
    (SpectralNorm, "remove", "remove_spectral_norm"),
)


def refuse_reparametrizations() -> None:
    """Install the hook and the wrappers, once per process."""
    global _installed
    if not _installed:
        _installed = True
        register_module_parameter_registration_hook(_check)
        for owner, function, words in _FUNCTIONS:
            setattr(owner, function, _refusing(getattr(owner, function), words))


def _refusing(function: Callable[..., Any], words: str) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        module, name, *_ = given.arguments.values()
        if not isinstance(module, nn.Module):  # a hook, and the module
            module, name = name, module.name
        # The parameters from which the value is computed, which torch's functions in C would read beyond their end.
        originals = parametrize.is_parametrized(module, name) and module.parametrizations[name]
        if (unit := unit_around(module)) is None:
            return function(*args, **kwargs)
        for each in (*unit.param_refs, *unit.shared_refs):
            holder, attribute = each.module_ref(), each.attribute
            if holder is originals or (holder is module and attribute in (name, *(name + end for end in _ENDS))):
                raise UsageError(
                    f"{name!r} of a {plain_class(module).__name__} is a parameter of unit {unit.label}, and cannot be "
                    f"reparametrized by torch.nn.utils.{words}. Call it before the module is sharded"
                )
        return function(*args, **kwargs)

    return call


def _check(module: nn.Module, name: str, parameter: Any) -> None:
    if not name.endswith(_SUFFIX):  # nearly all
        return
    attribute = name.removesuffix(_SUFFIX)
    unit = owner_of(parameter) if parameter is not None else None
    if unit is not None and any(
        each.attribute == attribute and each.module_ref() is module for each in unit.param_refs
    ):
        raise UsageError(
            f"{attribute!r} of a {plain_class(module).__name__} is a parameter of unit {unit.label}, and cannot become "
            f"{name!r}, as torch.nn.utils.prune names a parameter that it replaces. Call it before the module is "
            "sharded. Parameters that were pruned before wrapping are pruned further inside summon_full_params()"
        )
