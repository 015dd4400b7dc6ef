"""A mesh of all axes, on which parameters are DTensors before data parallelism splits them.

[Note: SPMD meshes] Such a parameter also lies on data-parallel dimensions, as `Replicate()`, and modules compute with
it there: inputs are DTensors of the same mesh. Its local tensor is stored as under tensor parallelism; the
other dimensions are those of its parts. Its gradient arrives as a DTensor of that mesh and may be partial along the
data-parallel dimensions: the local gradients are summed by the reduction of its unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch

from ...errors import UsageError
from ..base import _dtensor
from ..parts.strides import stride_by_rows


@dataclass(frozen=True, eq=False)
class SpmdMesh:
    """A mesh of all axes. [Note: SPMD meshes]

    Attributes:
        mesh: the DeviceMesh.
        shard, replicate: the names of its data-parallel dimensions. Several dimensions of `shard` are neighbors in the
            mesh.
    """

    mesh: Any
    shard: tuple[str, ...]
    replicate: tuple[str, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> SpmdMesh:
        return self  # copies of a model communicate over the same mesh

    @cached_property
    def dp(self) -> Any:
        """The mesh of data parallelism: (shard,), (replicate,) or (replicate, shard). Makes a group if several
        dimensions become one."""
        meshes = [self._flat(names) for names in (self.replicate, self.shard) if names]
        return meshes[0] if len(meshes) == 1 else _dtensor.concatenated(meshes)

    def _flat(self, names: tuple[str, ...]) -> Any:
        return self.mesh[names[0]] if len(names) == 1 else _dtensor.flattened(self.mesh[names], "_".join(names))

    @cached_property
    def dp_dims(self) -> frozenset[int]:
        """The numbers of the data-parallel dimensions."""
        return frozenset(map(self.mesh.mesh_dim_names.index, (*self.shard, *self.replicate)))

    @cached_property
    def beside(self) -> Any:
        """The mesh of the other dimensions; None if there are none."""
        names = self.mesh.mesh_dim_names
        others = tuple(name for mesh_dim, name in enumerate(names) if mesh_dim not in self.dp_dims)
        return self.mesh[others] if others else None

    def others_of(self, placements: Sequence[Any]) -> tuple[Any, ...]:
        """Those of `placements` that are along the other dimensions."""
        return tuple(each for mesh_dim, each in enumerate(placements) if mesh_dim not in self.dp_dims)

    def check(self, path: str, parameter: Any) -> None:
        """Refuse a parameter that is not a DTensor of the mesh, or is split along data-parallel dimensions already."""
        call = "fully_shard(mesh=..., dp_mesh_dims=...)"
        if not _dtensor.is_dtensor(parameter):
            raise UsageError(
                f"{path!r} is a {type(parameter).__name__}; {call} takes DTensors on the whole mesh, as "
                "torch.distributed.tensor.distribute_module(module, mesh) creates them from all parameters. List it "
                "in ignored_params=, or pass as mesh= only the data-parallel dimensions, without dp_mesh_dims="
            )
        mesh, placements = parameter.device_mesh, parameter.placements
        if mesh != self.mesh:
            raise UsageError(
                f"{path!r} is a DTensor on {mesh}; {call} was given {self.mesh}. Both must be the same mesh"
            )
        for mesh_dim in sorted(self.dp_dims):
            if not placements[mesh_dim].is_replicate():
                raise UsageError(
                    f"{path!r} is a DTensor with placements {tuple(placements)}, of which {placements[mesh_dim]} is "
                    f"along {mesh.mesh_dim_names[mesh_dim]!r}, a dimension of dp_mesh_dims. Expected Replicate() "
                    "there: fully_shard() splits the parameter along it"
                )

    def spec_at_rest(self, stored: Any, dim: int, dtype: torch.dtype) -> tuple[Any, int]:
        """The DTensorSpec of a parameter between iterations, of which `dim` is split over the shards, and the dimension
        of its mesh that is the shards'.

        Several dimensions for sharding are one dimension of its mesh, with the replicas' in front.
        """
        from torch.distributed.tensor import Replicate, Shard

        names, before = self.mesh.mesh_dim_names, stored.placements
        placements: list[Any] = list(before)
        for mesh_dim in map(names.index, self.shard):
            later = range(mesh_dim + 1, self.mesh.ndim)
            split = prod(self.mesh.size(each) for each in later if getattr(before[each], "dim", None) == dim)
            placements[mesh_dim] = Shard(dim) if split == 1 else _dtensor.strided_shard(dim, split)
        stride = stride_by_rows(stored.shape, 0)
        if len(self.shard) < 2:
            split_by = names.index(self.shard[0]) if self.shard else -1
            return _dtensor.new_spec(self.mesh, placements, stored.shape, stride, dtype), split_by
        found: list[Any] = []
        for mesh_dim, name in enumerate(names):
            if name == self.shard[0]:
                found += [Replicate()] * (self.dp.ndim - 1) + [placements[mesh_dim]]
                split_by = len(found) - 1
            elif mesh_dim not in self.dp_dims:
                found.append(placements[mesh_dim])
        return _dtensor.new_spec(self._mesh_at_rest, found, stored.shape, stride, dtype), split_by

    @cached_property
    def _mesh_at_rest(self) -> Any:
        names = self.mesh.mesh_dim_names
        meshes = [self.dp if name == self.shard[0] else self.mesh[name] for name in names if self._is_kept(name)]
        return meshes[0] if len(meshes) == 1 else _dtensor.concatenated(meshes)

    def _is_kept(self, name: str) -> bool:
        return name == self.shard[0] or name not in (*self.shard, *self.replicate)
