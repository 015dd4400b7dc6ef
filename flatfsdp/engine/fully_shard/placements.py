"""The dimension along which each parameter is split: a layout in rows splits the slowest dimension in memory; and the
grains of parameters, between which that must be.

[Note: stored order] `Shard(dim)` of a parameter is its rows once `dim` is the slowest dimension in its memory. So its
values are laid out that way as they are sharded, and neither gathers nor reductions need a copy for it. For a DTensor
this applies to its local tensor, and its strides show it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from ...api import Config, ShardingStrategy
from ...errors import ConfigValueError, refuse_type
from ..base import _dtensor
from ..dtensor.gather_hooks import has_gather_hooks
from ..features.optimizer_grains import is_optimizer
from ..flat.layout_views import stored_in_order
from ..layout.layout import ParamSpec
from ..models.param_registry import owner_of
from ..parts.strides import stride_by_rows
from ..planning.grains import Preferred
from ..wrapping.chosen_grains import ChosenGrains, chosen_grains
from .meshes import ChosenMesh

ARGUMENT = "shard_placement_fn"


def placements_of(
    root: nn.Module, chosen: Any, ignored: Collection[nn.Parameter], default: ChosenMesh
) -> dict[nn.Parameter, tuple[int, ChosenMesh]]:
    """The dimension along which each parameter in `root` that no unit owns is to be split, and over which ranks, as
    the user-defined `chosen` returns; 0 and `default` if `chosen` is None or returns None. It is called once for
    each of them.

    Raises:
        ConfigTypeError, ConfigValueError: it is not callable, or returns an unsupported placement.
    """
    if chosen is not None and not callable(chosen):
        refuse_type(ARGUMENT, chosen, "None, or a callable (parameter) -> Shard or None")
    placed, meshes = {}, [default]
    for name, parameter in root.named_parameters():
        if parameter in ignored or owner_of(parameter) is not None:
            continue
        placement: Any = None if chosen is None else chosen(parameter)
        mesh = default
        if hasattr(placement, "mesh_info"):
            mesh = _known(ChosenMesh.of_parameter(placement.mesh_info, name), meshes)
            placement = placement.placement
            if mesh.mesh.device_type != default.mesh.device_type:
                raise ConfigValueError(
                    f"{ARGUMENT}: got a mesh on {mesh.mesh.device_type} for parameter {name!r}, and one on "
                    f"{default.mesh.device_type} for the module. A module computes on one type of device"
                )
        placed[parameter] = _dim_of(placement, name, parameter), mesh
    return placed


def grains_in(root: nn.Module, given: Any, config: Config) -> ChosenGrains:
    """The grains of parameters in `root`, as the user-defined `given` has them; none for None.

    Raises:
        ConfigTypeError, ConfigValueError, UsageError: as `chosen_grains`.
    """
    if given is None:
        return ChosenGrains()
    if not isinstance(given, Mapping) and not is_optimizer(given) and (not callable(given) or isinstance(given, type)):
        accepted = (
            "None, a mapping from names or modules to grains, a callable (name, parameter) -> grain, or a class of "
            "optimizers"
        )
        refuse_type("layout", given, accepted)
    chosen = chosen_grains(root, config.replace(layout=given))
    assert isinstance(chosen, ChosenGrains)
    return chosen


def check_grains(root: nn.Module, grains: ChosenGrains, placed: Mapping[nn.Parameter, tuple[int, ChosenMesh]]) -> None:
    """Refuse to split `placed` parameters inside of their grains. Ranks have the rows of a DTensor that `torch.chunk`
    gives them, since no placement describes others: there is nothing to plan.

    Raises:
        ConfigValueError: a cut lies inside of a grain.
    """
    grain_of = {module._parameters[attribute]: grain for (module, attribute), grain in grains.items()}
    for name, parameter in root.named_parameters() if grain_of else ():
        if parameter not in placed or (grain := grain_of.get(parameter)) is None or isinstance(grain, Preferred):
            continue  # what is preferred whole, and cut by rows, is exchanged
        dim, mesh = placed[parameter]
        shape = tuple(_local(parameter).shape)
        spec = ParamSpec(name, shape, stride_by_rows(shape, dim))
        elements = grain.elements(spec)
        world = 1 if mesh.strategy is ShardingStrategy.NO_SHARD else mesh.mesh.size(mesh.mesh.ndim - 1)
        if _cuts_between(spec, elements, world):
            continue
        fewer = max(ranks for ranks in range(1, world) if world % ranks == 0 and _cuts_between(spec, elements, ranks))
        raise ConfigValueError(
            f"layout: {name!r} of shape {shape} is split over {world} ranks after each {-(-spec.rows // world)} of its "
            f"{spec.rows} rows along dimension {dim}, which is inside of its grain, {grain}, of {elements:,} elements. "
            f"Ranks have equal numbers of rows of a DTensor: shard over {fewer} of these ranks, with replicas, give "
            "another grain, split another dimension by shard_placement_fn=, or use FullyShardedDataParallel, which "
            "plans other layouts"
        )


def _cuts_between(spec: ParamSpec, elements: int, ranks: int) -> bool:
    """Whether `ranks` ranks have multiples of `elements` of the parameter, or one of them has all."""
    piece = -(-spec.rows // ranks) * (spec.numel // max(spec.rows, 1))
    return piece >= spec.numel or piece % elements == 0


def _known(mesh: ChosenMesh, meshes: list[ChosenMesh]) -> ChosenMesh:
    """`mesh`, or an equivalent one among `meshes`."""
    known = next((each for each in meshes if each.is_as(mesh)), None)
    if known is None:
        meshes.append(mesh)
    return known or mesh


def _dim_of(placement: Any, name: str, parameter: nn.Parameter) -> int:
    if placement is None:
        return 0
    accepted = "a torch.distributed.tensor.Shard, or None for Shard(0)"
    dim = getattr(placement, "dim", None)
    if type(placement).__name__ != "Shard" or not isinstance(dim, int):
        raise ConfigValueError(f"{ARGUMENT}: got {placement!r} for parameter {name!r}. Accepted: {accepted}")
    if not -parameter.dim() <= dim < parameter.dim():
        raise ConfigValueError(
            f"{ARGUMENT}: got {placement!r} for parameter {name!r}, which has {parameter.dim()} dimensions. Accepted: "
            f"{accepted}, of one of these"
        )
    dim %= parameter.dim()
    if dim and _is_made_of_others(parameter) and not has_gather_hooks(_local(parameter)):
        raise ConfigValueError(
            f"{ARGUMENT}: got {placement!r} for parameter {name!r}, which is a {type(_local(parameter)).__name__}, a "
            "tensor made of others without hooks for the all-gather. Such parameters are split along dimension 0. "
            "Accepted: Shard(0), or None"
        )
    return dim


def orders_of(dims: Mapping[nn.Parameter, int]) -> dict[nn.Parameter, int]:
    """The plain ones of these parameters, each with the dimension that is to be the slowest in the memory of its
    shards. DTensors get local tensors in that order now. [Note: stored order]"""
    orders = {}
    for parameter, dim in dims.items():
        if _is_made_of_others(parameter):  # its own transform determines the memory
            continue
        if not _dtensor.is_dtensor(parameter):
            orders[parameter] = dim
            continue
        spec = _dtensor.spec_of(parameter)
        stride = stride_by_rows(spec.shape, dim)
        as_stored = _dtensor.new_spec(spec.mesh, spec.placements, spec.shape, stride, parameter.dtype)
        local = _local(parameter).detach()
        _dtensor.set_local(parameter, stored_in_order(local, stride_by_rows(local.shape, dim)), as_stored)
    return orders


def _is_made_of_others(parameter: nn.Parameter) -> bool:
    """Whether its local tensor is a tensor that is made of others, or defines which tensors are gathered for it."""
    local = _local(parameter)
    return hasattr(type(local), "__tensor_flatten__") or has_gather_hooks(local)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return _dtensor.local_of(parameter) if _dtensor.is_dtensor(parameter) else parameter
