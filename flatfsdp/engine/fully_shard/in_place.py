"""Modules that hold their unit themselves: sharding, one by one or by a policy; moves; and state dicts while their unit
is unsharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from ...api import MixedPrecision
from ...errors import ConfigTypeError, did_you_mean, one_rank_warns, refuse_type
from ..agreement.process_groups import is_first_of, resolve_groups
from ..config.arguments import check_arguments, own
from ..dtensor.dtensor_face import DTensorFaces
from ..dtensor.gather_extensions import ExtendedParam, GatherExtensions
from ..dtensor.holder_classes import mark
from ..dtensor.tensor_parallel import StoredDTensor
from ..flat.states import SUMMONED
from ..guards import enclosing_ddp
from ..guards.param_guard import handle_and_index_of
from ..models.param_registry import unit_around
from ..models.rest import check_idle, quiesce
from ..runtime.unit import Unit
from ..transforms.extensions import TransformedParam
from ..wrapping.auto_wrap import plan_wrapping
from ..wrapping.build import Front, build_unit
from ..wrapping.shared_storage import follow_ties
from ..wrapping.wrapper_support import apply_to_tensors, keep_model
from .arguments import CALL, Call, check_call
from .class_swap import swap_class
from .placements import grains_in, orders_of

BY_POLICY = "fully_shard_by_policy"

# Units whose shards the running call of `_apply` has changed; None outside of one.
_changed: list[Unit] | None = None


def shard(call: Call, front_class: type) -> None:
    """Make one unit of the modules of `call`, and give them classes that also derive from `front_class`."""
    dims = _by_path(call, call.dims)
    with one_rank_warns(this_rank=is_first_of(None, call.config.device_mesh)):
        if call.dims:
            follow_ties(call.root, (), call.config.ignored_params)  # before memory is laid out in another order
        orders = orders_of(call.dims)
        front = Front(
            f"{CALL}()",
            call.modules,
            call.output_dtype,
            _faces,
            lambda parallel: (GatherExtensions(parallel, call.policy, dims), parallel),
            call.materializes,
            call.mesh.spmd,
            call.elsewhere,
            _by_path(call, orders),
        )
        model = build_unit(call.root, resolve_groups(call.config), island=call.island, front=front)
    enclosing_ddp.watch(front_class)
    for module in call.modules:
        swap_class(module, front_class)
        module.__dict__["_unit"] = model.outermost
    keep_model(call.modules[0], model)
    _watch_state_dicts(model.outermost)


def _by_path(call: Call, dims: Mapping[nn.Parameter, int]) -> dict[str, int]:
    by_path = call.root.named_parameters(remove_duplicate=False)
    return {path: dims[parameter] for path, parameter in by_path if parameter in dims}


def _faces(transformed: Sequence[TransformedParam], leaves: Sequence[nn.Parameter], mesh: Any) -> DTensorFaces:
    """Makes the DTensors of `leaves` on `mesh`, and also on that of tensor parallelism if they lie on one."""
    states = {id(each.leaf): each.state for each in transformed}
    found = [states.get(id(leaf)) for leaf in leaves]
    extended = [each if isinstance(each, ExtendedParam) else None for each in found]
    outer = [one if more is None else more.outer for one, more in zip(found, extended, strict=True)]
    stored = [each if isinstance(each, StoredDTensor) else None for each in outer]
    return DTensorFaces(mesh, tuple(stored), tuple(None if each is None else each.hooks for each in extended))


# -- by a policy -------------------------------------------------------------------------------------------------------


def shard_by_policy(module: Any, policy: Any, front_class: type, settings: dict[str, Any]) -> None:
    """Shard the modules that `policy` chooses inside `module`, children first, then `module`, each by `settings`: the
    arguments of `fully_shard`, and others of the wrapper."""
    if not isinstance(module, nn.Module):
        refuse_type("module", module, "an nn.Module")
    with one_rank_warns(this_rank=is_first_of(None, settings["mesh"])):
        # All other arguments, before any module is sharded.
        whole = _checked(module, {**settings, "shard_placement_fn": None, "layout": None})
        grains = grains_in(module, settings["layout"], whole.config)  # by the names that parameters have there
        settings = {**settings, "mesh": whole.config.device_mesh, "layout": grains}
        policy = check_arguments(module, auto_wrap_policy=policy).auto_wrap_policy
        follow_ties(module, (), whole.config.ignored_params)  # across units, while all of them have their memory
        planned = () if policy is None else _plan(module, policy, settings, whole)
    for each, own_settings, island in planned:
        shard(_checked(each, own_settings, island=island), front_class)
    shard(_checked(module, settings), front_class)


def _checked(module: nn.Module, settings: dict[str, Any], *, island: bool = False) -> Call:
    return check_call(module, **settings, materializes=True, island=island)


def _plan(
    root: nn.Module, policy: Any, settings: dict[str, Any], whole: Call
) -> list[tuple[nn.Module, dict[str, Any], bool]]:
    # The wrapper's config has classes that compute in full precision, FSDP2's does not.
    precision = whole.config.mixed_precision if own(settings["mp_policy"], MixedPrecision) is not None else None
    kwargs = {**settings, "mixed_precision": precision}
    plan = []
    for planned in plan_wrapping(root, policy, kwargs=kwargs, ignored_params=whole.config.ignored_params):
        chosen = {name: value for name, value in planned.kwargs.items() if name != "mixed_precision"}
        for name in (name for name in chosen if name not in settings):
            hint = did_you_mean(name, list(settings))
            raise ConfigTypeError(
                f"auto_wrap_policy, for {planned.path!r}: {name!r} is not an argument of {BY_POLICY}. Accepted: "
                f"{', '.join(settings)}.{hint and ' ' + hint}"
            )
        if planned.in_full_precision:
            chosen["mp_policy"] = None
        plan.append((planned.module, chosen, planned.in_full_precision))
    return plan


# -- moves and casts ---------------------------------------------------------------------------------------------------


def apply(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], change_others: Callable[[], Any]) -> None:
    """Let `change` cast, move or empty the shards of the unit of `module`, once for all of its entries, and
    `change_others()` all other tensors in `module`."""
    unit: Unit = module.__dict__["_unit"]
    with _applying() as changed:
        is_first = unit not in changed
        changed.append(unit)
        apply_to_tensors(module, change, change_others, shards=is_first)


@contextmanager
def _applying() -> Iterator[list[Unit]]:
    global _changed
    before = _changed
    _changed = [] if before is None else before
    try:
        yield _changed
    finally:
        _changed = before


# -- state dicts -------------------------------------------------------------------------------------------------------


def _watch_state_dicts(unit: Unit) -> None:
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
