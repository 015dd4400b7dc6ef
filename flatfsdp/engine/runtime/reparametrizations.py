"""What torch.nn.utils makes of parameters that are sharded already (`prune`, `spectral_norm`): refused where it begins.

Both let a module list its parameter under another name, and compute with something else in its place. Units know by
their names what modules hold, and with flat parameters modules list none, which torch takes for granted.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...errors import UsageError
from .entries import plain_class
from .param_registry import owner_of

_SUFFIX = "_orig"
_installed = False


def refuse_reparametrizations() -> None:
    """Install the hook, once per process."""
    global _installed
    if not _installed:
        _installed = True
        register_module_parameter_registration_hook(_check)


def _check(module: nn.Module, name: str, parameter: Any) -> None:
    if not name.endswith(_SUFFIX):  # nearly all
        return
    place = name.removesuffix(_SUFFIX)
    unit = owner_of(parameter) if parameter is not None else None
    if unit is not None and any(each.attribute == place and each.module_ref() is module for each in unit.param_refs):
        raise UsageError(
            f"{place!r} of a {plain_class(module).__name__} is a parameter of unit {unit.label}, and cannot become "
            f"{name!r}, as torch.nn.utils.prune and spectral_norm name what they replace. Call them before the module "
            "is sharded. What was pruned before it was wrapped is pruned further inside summon_full_params()"
        )
