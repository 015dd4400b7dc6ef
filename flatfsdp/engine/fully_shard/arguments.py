"""The arguments of `fully_shard`, checked, as a `Config` of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...api import Config
from ...errors import ConfigValueError, UsageError, refuse_type, refuse_value
from ..agreement.process_groups import require_process_group
from ..config.arguments import check_arguments, check_shardable, has_forward
from ..dtensor.spmd_mesh import SpmdMesh
from ..runtime.entries import plain_class
from ..runtime.unit import Unit
from .meshes import ChosenMesh
from .placements import check_grains, grains_in, placements_of
from .policies import offload_of, precision_of

CALL = "fully_shard"


@dataclass(frozen=True)
class Call:
    """A call of `fully_shard`.

    Attributes:
        modules: the entries: the given modules, without those that are inside others of these.
        root: the one, or a list of them.
        policy: the one of mixed precision, as given.
        mesh: the ranks over which the modules are sharded.
        placed: the dimension along which each parameter is split, and the ranks over which it is split.
        materializes: whether tensors on the meta device get memory and values now.
        island: whether it computes in full precision among neighbors that do not.
    """

    modules: list[nn.Module]
    root: nn.Module
    config: Config
    output_dtype: torch.dtype | None
    policy: Any
    mesh: ChosenMesh
    placed: dict[nn.Parameter, tuple[int, ChosenMesh]]
    materializes: bool = False
    island: bool = False

    @property
    def dims(self) -> dict[nn.Parameter, int]:
        """The dimension along which each parameter is split."""
        return {parameter: dim for parameter, (dim, _) in self.placed.items()}

    @property
    def elsewhere(self) -> dict[nn.Parameter, tuple[Config, SpmdMesh | None]]:
        """Configs of parameters that are sharded over other ranks, and the mesh of all axes on which they lie."""
        others = {mesh: (mesh.applied_to(self.config), mesh.spmd) for _, mesh in self.placed.values()}
        return {parameter: others[mesh] for parameter, (_, mesh) in self.placed.items() if mesh is not self.mesh}


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
    layout: Any = None,
    materializes: bool = False,
    island: bool = False,
    **others: Any,
) -> Call:
    """Refuse arguments that `fully_shard` does not support. `others` are the wrapper's. Communicates only to make
    groups over dimensions of a mesh that become one axis."""
    modules = _modules(module)
    if isinstance(reshard_after_forward, int | None) is False:
        refuse_type("reshard_after_forward", reshard_after_forward, "True, False, a number of ranks, or None")
    policy, precision, output_dtype = precision_of(mp_policy)
    offload = offload_of(offload_policy)
    ignored = _ignored(ignored_params)
    require_process_group(CALL)
    chosen = ChosenMesh.of(mesh, dp_mesh_dims)
    root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    _check_parameters(root, ignored)
    placed = placements_of(root, shard_placement_fn, ignored, chosen)
    on_meta = any(p.is_meta for p in root.parameters()) and not materializes
    config = check_arguments(
        root,
        sharding_strategy=chosen.strategy,
        cpu_offload=offload,
        mixed_precision=precision,
        device_id=torch.device(chosen.mesh.device_type),
        ignored_states=[p for p in root.parameters() if p in ignored] or None,
        device_mesh=chosen.mesh,
        check_values="off" if on_meta else "warn",
        reshard_after_forward=reshard_after_forward,
        layout="rows",
        **others,
    )
    _check_on_meshes(root, placed)
    check_grains(root, grains_in(root, layout, config), placed)
    return Call(modules, root, config, output_dtype, policy, chosen, placed, materializes, island)


def _modules(given: Any) -> list[nn.Module]:
    accepted = "a module, or a list of modules"
    if isinstance(given, type) and issubclass(given, nn.Module):
        refuse_type("module", given, accepted, hint=f"Create an instance first: {given.__name__}(...).")
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
                f"module: got a {plain_class(each).__name__}, which defines no forward, so nothing would gather its "
                "parameters. Accepted: modules that are called; shard those inside it, or the one around it."
            )
        taken = each.__dict__.get("_unit")
        if taken is not None and not isinstance(taken, Unit):
            raise UsageError(
                f"module: {plain_class(each).__name__} has an attribute named _unit, the name under which "
                f"{CALL}() keeps its state. Rename the attribute"
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


def _check_parameters(root: nn.Module, ignored: set[nn.Parameter]) -> None:
    for name, parameter in root.named_parameters():
        if parameter in ignored:
            continue
        check_shardable(name, parameter)
        if parameter.dim() == 0:
            raise ConfigValueError(
                f"parameter {name!r} is a scalar, which has no rows to shard. Make it a 1-D tensor with one element, "
                "or name it in ignored_params="
            )


def _check_on_meshes(root: nn.Module, placed: Mapping[nn.Parameter, tuple[int, ChosenMesh]]) -> None:
    """Refuse parameters that do not lie on the mesh of all axes that was given for them."""
    for name, parameter in root.named_parameters():
        if parameter in placed and (spmd := placed[parameter][1].spmd) is not None:
            spmd.check(name, parameter)
