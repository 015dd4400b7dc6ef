"""Parameters that tensor parallelism has made DTensors: the flat parameter stores the local tensor of each, and
modules see DTensors while a unit is unsharded.

[Note: tensor parallelism] To the engine such a parameter is a plain tensor, the local one, whose peers are the
ranks of the unit's own axes. Modules see it as a DTensor of its original mesh. The backward of that conversion brings
the gradient to the placements of the parameter, over that mesh (a norm's weight under sequence parallelism has a
partial one, which is summed there); from there it is handled like any other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import UsageError
from ..base import _dtensor
from ..comm.axes import Axis
from ..layout.layout import ParamSpec, Part
from ..parts.part import Ranges, cut, stored_shape
from ..parts.strides import stride_by_rows
from ..transforms.extensions import Transform
from .data_mesh import DataMeshes
from .specs import require_dtensors, spec_at_rest
from .spmd_mesh import SpmdMesh


@dataclass(frozen=True, eq=False)
class StoredDTensor:
    """The description of a DTensor parameter that is stored as this rank's part of it.

    Attributes:
        mesh, placements: those of the DTensor.
        shape: of the whole; stride: its strides, in the memory order of the parts. [Note: stored order]
        spmd: the SPMD mesh, if `mesh` also has the data-parallel dimensions. [Note: SPMD meshes]
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    spmd: SpmdMesh | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredDTensor:
        return self  # copies of a model communicate over the same mesh

    def spec(self, dtype: torch.dtype) -> Any:
        """The DTensorSpec of it in `dtype`."""
        return _dtensor.new_spec(self.mesh, self.placements, self.shape, self.stride, dtype)

    def around(self, local: torch.Tensor) -> torch.Tensor:
        """The DTensor with the local tensor `local`, through which gradients reach that."""
        if self.spmd is not None:
            made: torch.Tensor = _OnSpmdMesh.apply(local, self)
            return made
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def gradient(self, grad: Any) -> Any:
        """This rank's part of a gradient, which arrives as a DTensor: that of a norm's weight is a partial sum under
        sequence parallelism. Along data-parallel dimensions it stays unchanged. Collective over the mesh."""
        if not _dtensor.is_dtensor(grad):
            return grad
        placements = list(self.placements)
        for mesh_dim in self.spmd.dp_dims if self.spmd is not None else ():
            placements[mesh_dim] = grad.placements[mesh_dim]
        return grad.redistribute(placements=placements).to_local()

    @property
    def beside(self) -> tuple[Any, tuple[Any, ...]]:
        """The mesh of the ranks that have the other parts, None if this rank's is the whole; and the placements."""
        if self.spmd is None:
            return self.mesh, self.placements
        return self.spmd.beside, self.spmd.others_of(self.placements)


class _OnSpmdMesh(torch.autograd.Function):
    """A DTensor of a local tensor. `DTensor.from_local` would sum its gradient over data-parallel dimensions."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, state: StoredDTensor) -> Any:
        ctx.state = state
        return _dtensor.dtensor(local.detach(), state.spec(local.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.state.gradient(grad), None


class TensorParallel(Transform):
    """The transformation of DTensors on a mesh other than the axes (`groups`) of their unit."""

    def __init__(self, meshes: DataMeshes | None = None) -> None:
        """`meshes`: those over which the parameters are also sharded. Without them no new tensor can be stored."""
        self._meshes = meshes

    def __reduce__(self) -> tuple[type[TensorParallel], tuple[()]]:
        return TensorParallel, ()

    def applies(self, parameter: torch.Tensor) -> bool:
        """Whether `parameter` is a DTensor."""
        return _dtensor.is_dtensor(parameter)

    def check(self, path: str, parameter: torch.Tensor) -> None:
        """Refuse a DTensor that lies on ranks of the unit's own axes, or has unsupported placements."""
        require_dtensors()
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        if mesh.get_coordinate() is None:
            raise UsageError(
                f"{path!r} is a DTensor on {mesh}, which does not contain this rank. Wrap its module only on the "
                "ranks of that mesh"
            )
        assert self._meshes is not None
        own = self._meshes.of(parameter)
        if mesh.device_type != (expected_type := own.groups.device.type):
            raise UsageError(
                f"{path!r} is a DTensor on {mesh}, whose device type is {mesh.device_type}; its unit computes on "
                f"{expected_type}. Create both meshes from one init_device_mesh({expected_type!r}, ...)"
            )
        if own.spmd is not None:
            own.spmd.check(path, parameter)
        elif len(shared := sorted(own.ranks.intersection(mesh.mesh.flatten().tolist()))) > 1:
            raise UsageError(
                f"{path!r} is a DTensor on {mesh}, of which ranks {', '.join(map(str, shared))} are also among the "
                "ranks over which its unit is sharded. A parameter is sharded over the ranks that hold the same part "
                'of it: pass device_mesh=mesh["dp"] of the mesh on whose mesh["tp"] the parameter is distributed'
            )
        if any(each.is_partial() for each in placements):
            raise UsageError(f"{path!r} is a DTensor with placements {placements}: a partial sum is not a parameter")
        part = self.part(self._state_of(parameter))
        expected = tuple(parameter.shape) if part is None else stored_shape(part)
        local = tuple(_dtensor.local_of(parameter).shape)
        if expected != local:
            raise UsageError(
                f"{path!r} is a DTensor of shape {tuple(parameter.shape)} with placements {placements} on {mesh}, of "
                f"which this rank has {local}; expected {expected}, as torch.chunk would divide it"
            )

    def store(self, path: str, parameter: torch.Tensor) -> tuple[torch.Tensor, StoredDTensor]:
        """This rank's part of `parameter`, and the description of the DTensor."""
        return _dtensor.local_of(parameter.detach()), self._state_of(parameter)

    def _state_of(self, parameter: Any) -> StoredDTensor:
        spmd = None if self._meshes is None else self._meshes.of(parameter).spmd
        placements, stride = tuple(parameter.placements), tuple(_dtensor.spec_of(parameter).stride)
        return StoredDTensor(parameter.device_mesh, placements, parameter.shape, stride, spmd)

    def see(self, leaf: torch.Tensor, state: StoredDTensor) -> torch.Tensor:
        """The DTensor of which `leaf` is this rank's part."""
        return state.around(leaf)

    def describe(self, state: StoredDTensor) -> str:
        """Its placements, by the names of the mesh's dimensions, and its strides if they are not row-major."""
        names = state.mesh.mesh_dim_names or range(state.mesh.ndim)
        sides = (f"{n} of {state.mesh.size(d)}: {state.placements[d]}" for d, n in enumerate(names))
        stride = "" if state.stride == stride_by_rows(state.shape, 0) else f" strides {state.stride}"
        return f"{stride} as a DTensor ({', '.join(sides)})"

    def can_be_pickled(self, state: StoredDTensor) -> bool:
        """False: its mesh is of this job."""
        return False

    def assemble(self, stored: torch.Tensor, state: StoredDTensor) -> torch.Tensor:
        """The whole, from all ranks of the mesh. Collective over it."""
        return _dtensor.whole_of(self.around(stored.contiguous(), state))

    def around(self, stored: torch.Tensor, state: StoredDTensor) -> torch.Tensor:
        """The DTensor that holds `stored` itself."""
        made: torch.Tensor = _dtensor.dtensor(stored, state.spec(stored.dtype))
        return made

    def stored_in(self, seen: torch.Tensor) -> torch.Tensor:
        """This rank's part of a DTensor."""
        return _dtensor.local_of(seen) if _dtensor.is_dtensor(seen) else seen

    def sharded(self, rows: torch.Tensor, dp_mesh: Any, state: StoredDTensor) -> torch.Tensor:
        """The DTensor on both meshes, as in FSDP2, that has this rank's `rows`."""
        spec = spec_at_rest(dp_mesh, ParamSpec("", tuple(rows.shape)), 0, rows.dtype, state)
        made: torch.Tensor = _dtensor.dtensor(rows, spec)
        return made

    def part(self, state: StoredDTensor) -> Part | None:
        """The position of the stored part in the whole; None if that is all of it."""
        mesh, placements = state.beside
        return None if mesh is None else part_of(state.shape, state.stride, mesh, placements)

    def axes(self, state: StoredDTensor, device: torch.device) -> list[tuple[Axis, bool]]:
        """The axes of its mesh, each with True if its ranks hold different parts, False if copies."""
        found = []
        mesh, placements = state.beside
        for dim, placement in enumerate(placements):
            if mesh.size(dim) > 1:
                found.append((Axis.of(mesh.get_group(dim), device), not placement.is_replicate()))
        return found


def part_of(shape: Collection[int], stride: Collection[int], mesh: Any, placements: Collection[Any]) -> Part:
    """The position of this rank's part in a DTensor."""
    ranges: list[Ranges] = [((0, size),) if size else () for size in shape]
    copy = 0
    for dim, (placement, coordinate) in enumerate(zip(placements, mesh.get_coordinate(), strict=True)):
        count = mesh.size(dim)
        if placement.is_replicate():
            copy = copy * count + coordinate
        else:
            ranges[placement.dim] = cut(ranges[placement.dim], count, coordinate, _dtensor.split_factor_of(placement))
    whole = ParamSpec("", tuple(shape), tuple(stride))
    return Part(whole.shape, whole.stride, tuple(ranges), copy)
