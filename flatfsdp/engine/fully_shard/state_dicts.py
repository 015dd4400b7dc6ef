"""State dicts of modules whose unit is unsharded, between a forward and its backward or after `unshard()`: they contain
the parameters that the modules hold at rest, as any others do."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from ..dtensor.holder_classes import mark
from ..flat.states import SUMMONED
from ..guards.param_guard import handle_and_index_of
from ..models.param_registry import unit_around
from ..models.rest import check_idle, quiesce
from ..runtime.unit import Unit


def watch(unit: Unit) -> None:
    """Let the modules of `unit` save and load DTensors at any time."""
    modules = {id(each.module): each.module for each in (*unit.param_refs, *unit.shared_refs)}
    for module in modules.values():
        if _save_at_rest not in module._state_dict_hooks.values():  # copies have it already
            hook, hooks = module.register_state_dict_post_hook(_save_at_rest), cast(Any, module._state_dict_hooks)
            hooks.move_to_end(hook.id, last=False)  # other hooks must see its results
            module.register_load_state_dict_pre_hook(_load_at_rest)
            module.register_load_state_dict_post_hook(_mark_assigned)


def _unsharded_around(module: nn.Module) -> list[Unit]:
    """The unit of `module` with those whose parameters it shares, if one does not show its shards."""
    unit = unit_around(module)
    units = [] if unit is None or unit.phase is SUMMONED else [unit, *unit.owning_units]
    return units if not all(each.shows_shard for each in units) else []


def _mark_assigned(module: nn.Module, incompatible: Any) -> None:
    """torch's load state dict post-hook: parameters that `assign=True` has put in place get the marks of those before,
    as optimizers may be made before the next forward takes them over. [Note: marks of parameters]"""
    unit = unit_around(module)
    for param_ref in [] if unit is None else (*unit.param_refs, *unit.shared_refs):
        if param_ref.module_ref() is module:
            held = param_ref.current
            if isinstance(held, nn.Parameter) and held is not param_ref.held and held is not param_ref.leaf:
                mark(held, param_ref.leaf)


def _save_at_rest(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """torch's state dict post-hook. Nothing is freed: a single rank may save."""
    for unit in _unsharded_around(module)[:1]:
        for param_ref in (*unit.param_refs, *unit.shared_refs):
            if param_ref.module_ref() is module:
                handle, index = handle_and_index_of(param_ref.leaf)
                key, holder = prefix + param_ref.attribute, handle.face.holder_of(index)
                state_dict[key] = holder if state_dict.get(key) is param_ref.leaf else holder.detach()


def _load_at_rest(module: nn.Module, *_: Any) -> None:
    """torch's load state dict pre-hook."""
    if units := _unsharded_around(module):
        quiesce(units, collective=False, check=lambda each: check_idle(each, "load_state_dict()"))
