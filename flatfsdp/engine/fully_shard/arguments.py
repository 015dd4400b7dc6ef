"""The arguments of `fully_shard`, checked, as a `Config` of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...api import Config, ShardingStrategy
from ...errors import ConfigValueError, UsageError, refuse_type, refuse_value
from ..comm.process_groups import require_process_group, world_mesh
from ..config.arguments import check_arguments, has_forward
from ..runtime.entries import plain_class
from ..runtime.unit import Unit
from .placements import dims_of
from .policies import offload_of, precision_of

CALL = "fully_shard"


@dataclass(frozen=True)
class Call:
    """A call of `fully_shard`.

    Attributes:
        modules: the entries: what was given, without modules that are inside others of these.
        holder: the one, or a list of them.
        policy: of mixed precision, as it was given.
        dims: along which dimension each parameter is split.
        materializes: whether what is on the meta device gets memory and values now.
        island: whether it computes in full precision among neighbors that do not.
    """

    modules: list[nn.Module]
    holder: nn.Module
    config: Config
    output_dtype: torch.dtype | None
    policy: Any
    dims: dict[nn.Parameter, int]
    materializes: bool = False
    island: bool = False


def check_call(
    module: Any,
    *,
    mesh: Any,
    reshard_after_forward: Any,
    shard_placement_fn: Any,
    mp_policy: Any,
    offload_policy: Any,
    ignored_params: Any,
    dp_mesh_dims: Any = None,
    materializes: bool = False,
    island: bool = False,
    **others: Any,
) -> Call:
    """Refuse arguments that `fully_shard` cannot follow. `others` are the wrapper's. Communicates nothing."""
    modules = _modules(module)
    if dp_mesh_dims is not None:
        raise ConfigValueError(
            "dp_mesh_dims: parameters that are DTensors on a mesh of all axes are not supported yet. Pass mesh=, the "
            "mesh of the data-parallel axes alone"
        )
    if isinstance(reshard_after_forward, int | None) is False:
        refuse_type("reshard_after_forward", reshard_after_forward, "True, False, a number of ranks, or None")
    policy, precision, output_dtype = precision_of(mp_policy)
    offload = offload_of(offload_policy)
    ignored = _ignored(ignored_params)
    require_process_group(CALL)
    mesh = _mesh(mesh)
    holder = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    _check_parameters(holder, ignored)
    dims = dims_of(holder, shard_placement_fn, ignored)
    hybrid = ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else ShardingStrategy.FULL_SHARD
    on_meta = any(p.is_meta for p in holder.parameters()) and not materializes
    config = check_arguments(
        holder,
        sharding_strategy=hybrid,
        cpu_offload=offload,
        mixed_precision=precision,
        device_id=torch.device(mesh.device_type),
        ignored_states=[p for p in holder.parameters() if p in ignored] or None,
        device_mesh=mesh,
        check_values="off" if on_meta else "warn",
        reshard_after_forward=reshard_after_forward,
        layout="rows",
        **others,
    )
    return Call(modules, holder, config, output_dtype, policy, dims, materializes, island)


def _modules(given: Any) -> list[nn.Module]:
    accepted = "a module, or a list of modules"
    if isinstance(given, type) and issubclass(given, nn.Module):
        refuse_type("module", given, accepted, hint=f"Build one first: {given.__name__}(...).")
    if isinstance(given, nn.Module):
        modules = [given]
    elif isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        refuse_type("module", given, accepted)
    else:
        modules = list(given)
        for position, each in enumerate(modules):
            if not isinstance(each, nn.Module):
                refuse_type(f"module[{position}]", each, "an nn.Module")
        if not modules:
            refuse_value("module", given, f"{accepted}, at least one")
    for each in modules:
        if not has_forward(each):
            raise ConfigValueError(
                f"module: got a {plain_class(each).__name__}, which defines no forward, so that nothing would gather "
                "its parameters. Accepted: modules that are called; shard those inside it, or the one around it."
            )
        taken = each.__dict__.get("_unit")
        if taken is not None and not isinstance(taken, Unit):
            raise UsageError(
                f"module: {plain_class(each).__name__} has an attribute of its own that is called _unit, under which "
                f"{CALL}() keeps what it needs. Give the attribute another name"
            )
    return _outer(list(dict.fromkeys(modules)))


def _outer(modules: list[nn.Module]) -> list[nn.Module]:
    """`modules` that are inside none of the others."""
    inside = {inner for module in modules for inner in module.modules() if inner is not module}
    return [module for module in modules if module not in inside]


def _ignored(given: Any) -> set[nn.Parameter]:
    accepted = "None, or a set of parameters"
    if given is None:
        return set()
    if isinstance(given, (nn.Module, torch.Tensor, str, Mapping)) or not isinstance(given, Iterable):
        refuse_type("ignored_params", given, accepted)
    found = list(given)
    for each in found:
        if not isinstance(each, nn.Parameter):
            refuse_type("ignored_params", each, f"{accepted}, of which this is none")
    return set(found)


def _mesh(given: Any) -> Any:
    if given is None:
        return world_mesh()
    accepted = "None, a 1-D DeviceMesh, or a 2-D one (replicate, shard)"
    if not (isinstance(getattr(given, "ndim", None), int) and callable(getattr(given, "get_group", None))):
        refuse_type("mesh", given, accepted)
    if given.ndim not in (1, 2):
        raise ConfigValueError(
            f"mesh: got a {given.ndim}-D mesh. Accepted: {accepted}. Of a mesh with axes for tensor parallelism, pass "
            'the data-parallel part: mesh["dp"], or mesh["dp_replicate", "dp_shard"].'
        )
    if given.ndim == 2 and given.mesh_dim_names is None:
        raise ConfigValueError(
            "mesh: got a 2-D mesh whose axes have no names. Accepted: one that is made with mesh_dim_names, for "
            'example ("dp_replicate", "dp_shard"): replicas and shards must not be mixed up.'
        )
    return given


def _check_parameters(holder: nn.Module, ignored: set[nn.Parameter]) -> None:
    for name, parameter in holder.named_parameters():
        if parameter.dim() == 0 and parameter not in ignored and not getattr(parameter, "_fsdp_flattened", False):
            raise ConfigValueError(
                f"parameter {name!r} is a scalar, which has no rows to shard. Make it a 1-D tensor with one element, "
                "or name it in ignored_params="
            )
