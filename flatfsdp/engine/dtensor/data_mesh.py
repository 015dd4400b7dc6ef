"""The ranks over which parameters of a unit are sharded: over one mesh, or some over meshes of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..comm.axes import ProcessGroups
from .spmd_mesh import SpmdMesh


@dataclass(frozen=True, eq=False)
class DataMesh:
    """The ranks over which some parameters of a unit are sharded.

    Attributes:
        groups: their axes.
        mesh: the DeviceMesh of these axes; None if the user gave none.
        spmd: the mesh of which that is a part, if parameters lie on the whole of it. [Note: SPMD meshes]
    """

    groups: ProcessGroups
    mesh: Any = None
    spmd: SpmdMesh | None = None

    @cached_property
    def ranks(self) -> frozenset[int]:
        """The ranks of all axes."""
        groups = self.groups
        ranks = set(groups.shard.ranks) | set(groups.replicate.ranks if groups.replicate is not None else ())
        return frozenset(ranks if self.mesh is None else ranks | set(self.mesh.mesh.flatten().tolist()))


@dataclass(eq=False)
class DataMeshes:
    """The meshes of all parameters of a unit.

    Attributes:
        own: the unit's.
        others: of parameters that are sharded over other ranks, or lie on another mesh, by the ids of the user's
            objects.
    """

    own: DataMesh
    others: Mapping[int, DataMesh] = field(default_factory=dict)

    @property
    def all(self) -> list[DataMesh]:
        """The unit's, then the others in the order of parameters, each once."""
        return [self.own, *dict.fromkeys(self.others.values())]

    def of(self, parameter: torch.Tensor) -> DataMesh:
        """The mesh of a `parameter`, the user's object."""
        return self.others.get(id(parameter), self.own)

    def places(self, modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, DataMesh]]:
        """The places where `modules` hold parameters of other meshes."""
        held = [(module, name, id(p)) for module in modules for name, p in module._parameters.items()]
        return [(module, name, self.others[key]) for module, name, key in held if key in self.others]

    def follow(self, places: Iterable[tuple[nn.Module, str, DataMesh]]) -> None:
        """Assign the other meshes to the parameters in these `places` now, which may be new objects."""
        self.others = {id(module._parameters[name]): mesh for module, name, mesh in places}
