"""The ranks over which parameters are sharded, in the forms that users give: a mesh, the data-parallel dimensions of a
mesh of all axes, a mesh for each parameter. torch's own objects are recognized by their fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...api import Config, ShardingStrategy
from ...errors import ConfigTypeError, ConfigValueError, refuse_type, refuse_value
from ..agreement.process_groups import world_mesh
from ..dtensor.specs import require_dtensors
from ..dtensor.spmd_mesh import SpmdMesh

Names = str | tuple[str, ...] | None
_DIMS = "DataParallelMeshDims"
_INFO = "a 1-D DeviceMesh, a 2-D one with named axes (replicate, shard), or torch's FSDPMeshInfo or HSDPMeshInfo"


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The data-parallel dimensions of a mesh of all axes, by their names.

    Several dimensions for sharding become one axis of ranks, and so do several of replicas.

    Raises:
        ConfigTypeError, ConfigValueError: at construction, for a field that is neither a name nor a tuple of names, or
            without any name.
    """

    shard: Names = None
    """The dimensions over which parameters are sharded. None: they stay whole on each rank of `replicate`."""

    replicate: Names = None
    """The dimensions along which shards are replicated. None: there are no replicas."""

    def __post_init__(self) -> None:
        if not (self.shard_names + self.replicate_names):
            refuse_value(_DIMS, (self.shard, self.replicate), "at least one name, for shard or replicate")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names in `shard`, maybe none."""
        return _names(self, "shard")

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The names in `replicate`, maybe none."""
        return _names(self, "replicate")


@dataclass(frozen=True)
class ShardPlacementResult:
    """The result of `shard_placement_fn` for a parameter that is sharded over ranks of its own. If these are fewer than
    the module's, it should be a DTensor, on the mesh of the ranks that hold its other parts. Otherwise the others have
    a different parameter under its name, and a checkpoint holds only one of them.

    Raises:
        ConfigTypeError: at construction, `mesh_info` is not a mesh.
    """

    placement: Any
    """A `Shard`, or None for `Shard(0)`."""

    mesh_info: Any
    """A mesh, as for `fully_shard(mesh=...)`; or torch's `FSDPMeshInfo` or `HSDPMeshInfo`."""

    def __post_init__(self) -> None:
        if not (_is_mesh(self.mesh_info) or hasattr(self.mesh_info, "shard_mesh_dim")):
            refuse_type("ShardPlacementResult.mesh_info", self.mesh_info, _INFO)


@dataclass(frozen=True, eq=False)
class ChosenMesh:
    """The ranks over which parameters are sharded.

    Attributes:
        mesh: the one of data parallelism: (shard,), (replicate, shard), or (replicate,) if nothing is sharded.
        spmd: the mesh of all axes on which parameters lie, if they do. [Note: SPMD meshes]
    """

    mesh: Any
    strategy: ShardingStrategy
    spmd: SpmdMesh | None = None

    @classmethod
    def of(cls, given: Any, dims: Any, *, argument: str = "mesh") -> ChosenMesh:
        """The mesh for arguments of `fully_shard`. Makes a group if several dimensions become one."""
        if dims is None:
            mesh = _mesh(given, argument)
            return cls(mesh, ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else ShardingStrategy.FULL_SHARD)
        spmd = _spmd_mesh(given, dims, argument)
        strategy = ShardingStrategy.HYBRID_SHARD if spmd.replicate else ShardingStrategy.FULL_SHARD
        return cls(spmd.dp, strategy if spmd.shard else ShardingStrategy.NO_SHARD, spmd)

    @classmethod
    def of_parameter(cls, info: Any, name: str) -> ChosenMesh:
        """The mesh in a `ShardPlacementResult` for parameter `name`."""
        argument = f"shard_placement_fn: mesh_info of parameter {name!r}"
        if _is_mesh(info):
            return cls.of(info, None, argument=argument)
        mesh = getattr(info, "mesh", None)
        if not _is_mesh(mesh) or not hasattr(info, "shard_mesh_dim"):
            refuse_type(argument, info, _INFO)
        if (dims := getattr(info, "dp_mesh_dims", None)) is not None:
            chosen = cls.of(info.spmd_mesh, dims, argument=argument)
            if chosen.strategy is ShardingStrategy.NO_SHARD:
                raise ConfigValueError(f"{argument}: got {info!r}, which names no dimension to shard over")
            return chosen
        assert mesh is not None
        found = (getattr(info, "replicate_mesh_dim", None), info.shard_mesh_dim)
        if found != ((None, 0) if mesh.ndim == 1 else (0, 1)):
            raise ConfigValueError(
                f"{argument}: got dimensions (replicate, shard) {found} of a {mesh.ndim}-D mesh. Accepted: {_INFO}"
            )
        return cls.of(mesh, None, argument=argument)

    def is_as(self, other: ChosenMesh) -> bool:
        """Whether both stand for the same ranks, and make the same DTensors."""
        if (self.spmd is None) is not (other.spmd is None):
            return False
        on = (self.spmd.mesh, other.spmd.mesh) if self.spmd is not None and other.spmd is not None else (0, 0)
        return bool(self.mesh == other.mesh and self.strategy is other.strategy and on[0] == on[1])

    def applied_to(self, config: Config) -> Config:
        """`config` of the same unit, over these ranks."""
        return config.replace(device_mesh=self.mesh, sharding_strategy=self.strategy)


def _is_mesh(value: Any) -> bool:
    return isinstance(getattr(value, "ndim", None), int) and callable(getattr(value, "get_group", None))


def _mesh(given: Any, argument: str) -> Any:
    if given is None:
        return world_mesh()
    accepted = "None, a 1-D DeviceMesh, or a 2-D one (replicate, shard)"
    if not _is_mesh(given):
        refuse_type(argument, given, accepted)
    if given.ndim not in (1, 2):
        raise ConfigValueError(
            f"{argument}: got a {given.ndim}-D mesh. Accepted: {accepted}. Of a mesh with axes for tensor parallelism, "
            'pass the data-parallel part: mesh["dp"], or mesh["dp_replicate", "dp_shard"]; where parameters are '
            "DTensors on all of it, name that part with dp_mesh_dims="
        )
    if given.ndim == 2 and given.mesh_dim_names is None:
        raise ConfigValueError(
            f"{argument}: got a 2-D mesh whose axes have no names. Accepted: one that is made with mesh_dim_names, for "
            'example ("dp_replicate", "dp_shard"): replicas and shards must not be mixed up.'
        )
    return given


def _spmd_mesh(given: Any, dims: Any, argument: str) -> SpmdMesh:
    if isinstance(dims, type) or not all(hasattr(dims, name) for name in ("shard", "replicate")):
        refuse_type("dp_mesh_dims", dims, f"None, or a {_DIMS}, ours or torch's")
    if not _is_mesh(given) or given.mesh_dim_names is None:
        raise ConfigTypeError(
            f"{argument}: got {given!r} with dp_mesh_dims={dims!r}. Accepted: the DeviceMesh of all axes on which the "
            "parameters are DTensors, made with mesh_dim_names"
        )
    require_dtensors()
    shard, replicate = _names(dims, "shard"), _names(dims, "replicate")
    names = given.mesh_dim_names
    if missing := [name for name in (*shard, *replicate) if name not in names]:
        raise ConfigValueError(f"dp_mesh_dims: got {missing[0]!r}. Accepted: names of dimensions of the mesh, {names}")
    if len({*shard, *replicate}) < len(shard) + len(replicate) or not (shard or replicate):
        refuse_value("dp_mesh_dims", dims, "each dimension once, for shard or for replicate; at least one")
    numbers = [names.index(name) for name in shard]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))) if len(numbers) > 1 else False:
        raise ConfigValueError(
            f"dp_mesh_dims: got shard={shard!r} of a mesh with dimensions {names}. Dimensions that become one axis of "
            "shards must be adjacent in the mesh, in its order"
        )
    return SpmdMesh(given, shard, replicate)


def _names(dims: Any, field: str) -> tuple[str, ...]:
    value = getattr(dims, field)
    names = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        refuse_type(f"{_DIMS}.{field}", value, "None, the name of a dimension, or a tuple of names")
    return tuple(names)
