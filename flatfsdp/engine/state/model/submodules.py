"""State dicts of a part of a unit: of a module that is inside a wrapper, and is not a wrapper itself.

Such a call passes only through torch. Modules that hold parameters of a unit therefore have hooks, which put
placeholders in place during the call, unless the call is made on behalf of the wrapper. [Note:
placeholders]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ....errors import UsageError
from ...base import _torch
from ...config.state_dict_configs import StateDictType
from ...flat.param_refs import ParamRef
from ...flat.states import SUMMONED
from ...models.param_registry import unit_around
from ...models.rest import collective_call
from ...runtime.unit import Unit
from ..from_rank0 import shares_buffers, take_buffers
from .loading import UnitLoad, begin_unit
from .placeholders import Placeholder, Placeholders
from .saving import StateDictCall, begin, fill
from .types import only_rank0

_UNDER_WAY = "_part_under_way"


def watch(param_refs: Iterable[ParamRef]) -> None:
    """Register state dict hooks on the modules of `param_refs`, and on those that list flat parameters."""
    for module in {id(module): module for each in param_refs if (module := each.module_ref()) is not None}.values():
        if before_saving not in module._state_dict_pre_hooks.values():
            module.register_state_dict_pre_hook(before_saving)
            module.register_state_dict_post_hook(after_saving)
            module.register_load_state_dict_pre_hook(before_loading)
            module.register_load_state_dict_post_hook(after_loading)


def _unit_called(module: nn.Module) -> Unit | None:
    """The unit of `module`, if the call is not made on behalf of its wrapper."""
    left = module.__dict__.pop(_UNDER_WAY, None)
    if left is not None:  # of a call that raised
        left.abandon()
    unit = unit_around(module)
    if unit is None or unit.phase is SUMMONED:
        return None
    on_behalf = any(type(parameter) is Placeholder for parameter in module._parameters.values())
    flat = [each.attribute for each in unit.flat_refs if each.module_ref() is module]
    on_behalf = on_behalf or not module._parameters.keys() >= set(flat)  # they are hidden
    return None if on_behalf else unit


class _Saving(Placeholders):
    """Placeholders in a module, and the call for which they are replaced."""

    def __init__(self, unit: Unit, module: nn.Module) -> None:
        chosen = unit.options.state_dict
        if chosen.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            _refuse(unit, module, "has no flat parameter of its own (LOCAL_STATE_DICT)")
        if not _torch.saves_as_usual(module):
            _refuse(unit, module, "has a _save_to_state_dict of its own, which may read values")
        self.job: StateDictCall = begin(unit, [unit, *unit.owning_units], chosen)
        super().__init__(unit, receives=False, within=module)

    abandon = Placeholders.remove


def _refuse(unit: Unit, module: nn.Module, why: str) -> None:
    raise UsageError(
        f"state_dict() of a {type(module).__name__} inside unit {unit.label}: it {why}. Call it on the wrapper, whose "
        "state dict has the same keys, prefixed with the path of the module"
    )


def before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """torch's state dict pre-hook."""
    unit = _unit_called(module)
    if unit is not None:
        module.__dict__[_UNDER_WAY] = _Saving(unit, module)


def after_saving(module: nn.Module, destination: Any, prefix: str, metadata: Any) -> None:
    """torch's state dict post-hook. Collective for full values."""
    under_way = module.__dict__.pop(_UNDER_WAY, None)
    if not isinstance(under_way, _Saving):
        return
    under_way.remove()
    keys = [key for key, value in destination.items() if key.startswith(prefix) and type(value) is Placeholder]
    job, unit = under_way.job, under_way.unit
    shares = job.broadcasts_buffers and shares_buffers([unit, *unit.owning_units], module)
    with collective_call([unit], "state_dict()", always=shares, when=job.communicates):
        fill(job, unit, destination, keys, prefix)
        if shares:
            take_buffers(unit, module, destination, prefix)
    if not job.keeps:
        for key in keys:
            del destination[key]


def before_loading(module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """torch's load state dict pre-hook; the last argument is torch's list of errors."""
    unit = _unit_called(module)
    if unit is None:
        return
    if only_rank0(unit.options.state_dict):
        _refuse(unit, module, "is loaded from rank 0 (rank0_only=True), which only its wrapper can do")
    begin_unit(unit, state_dict)
    module.__dict__[_UNDER_WAY] = UnitLoad(unit, state_dict, prefix, others[-1], within=module)


def after_loading(module: nn.Module, incompatible: Any) -> None:
    """torch's load state dict post-hook."""
    under_way = module.__dict__.pop(_UNDER_WAY, None)
    if isinstance(under_way, UnitLoad):
        under_way.close()
