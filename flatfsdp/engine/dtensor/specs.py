"""The mesh and placements of a sharded parameter as a DTensor between iterations, as in FSDP2."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ...errors import UsageError
from ..base import _dtensor
from ..layout.layout import ParamSpec
from ..parts.part import shown_elsewhere
from ..parts.strides import stride_by_rows


def spec_at_rest(dp_mesh: Any, spec: ParamSpec, dim: int, dtype: torch.dtype, stored: Any = None) -> Any:
    """The DTensorSpec of a parameter that is split along `dim` over the last dimension of `dp_mesh`. No communication.

    Args:
        dp_mesh: the DeviceMesh of data parallelism: 1-D, or (replicate, shard) of a hybrid.
        spec: the layout's entry of the parameter, as it is stored here.
        dim: the dimension that is split.
        dtype: of the parameter.
        stored: the parameter's `StoredDTensor`, if it was a DTensor before it was sharded; None for a plain tensor.

    Its strides are row-major, as FSDP2's, independent of the order in memory. With tensor parallelism the mesh is that
    of both. Its rows are split by tensor parallelism first and by data parallelism second, so if both split `dim` the
    placement is `_StridedShard`.

    Raises:
        UsageError: this torch lacks required names, the meshes are not of one mesh, or no placement describes the rows
            of ranks.
    """
    from torch.distributed.tensor import Replicate, Shard

    replicas = [Replicate()] * (dp_mesh.ndim - 1)
    if stored is None:
        stride = spec.stride or stride_by_rows(spec.shape, 0)
        return _dtensor.new_spec(dp_mesh, [*replicas, Shard(dim)], spec.shape, stride, dtype)
    if stored.spmd is not None:
        made, mesh_dim = stored.spmd.spec_at_rest(stored, dim, dtype)
        _require_shown_rows(spec.name, made, dim, mesh_dim)
        return made
    before = prod(
        stored.mesh.size(mesh_dim)
        for mesh_dim, placement in enumerate(stored.placements)
        if getattr(placement, "dim", None) == dim
    )
    split = Shard(dim) if before == 1 else _dtensor.strided_shard(dim, before)
    mesh = mesh_of_both(dp_mesh, stored.mesh)
    placements, stride = [*replicas, split, *stored.placements], stride_by_rows(stored.shape, 0)
    made = _dtensor.new_spec(mesh, placements, stored.shape, stride, dtype)
    _require_shown_rows(spec.name, made, dim, dp_mesh.ndim - 1)
    return made


def _require_shown_rows(name: str, made: Any, dim: int, mesh_dim: int) -> None:
    """Refuse sizes for which ranks have other rows than those in a DTensor of the spec `made`, where dimension
    `mesh_dim` of the mesh splits `dim` after the others. torch's distributed checkpoint writes the DTensor's rows."""
    along = [i for i, each in enumerate(made.placements) if getattr(each, "dim", None) == dim]
    if mesh_dim not in along:  # all are replicas
        return
    cuts = tuple((made.mesh.size(i), _dtensor.split_factor_of(made.placements[i])) for i in along)
    size = made.shape[dim]
    if (where := shown_elsewhere(size, cuts, along.index(mesh_dim))) is None:
        return
    names = made.mesh.mesh_dim_names or range(made.mesh.ndim)
    rank = ", ".join(f"{names[i]} {number}" for i, number in zip(along, where, strict=True))
    split = " x ".join(str(count) for count, _ in cuts)
    before = prod(made.mesh.size(i) for i in along if i != mesh_dim)
    raise UsageError(
        f"parameter{f' {name!r}' if name else ''} of shape {tuple(made.shape)}: its {size} elements of dimension "
        f"{dim} are split by tensor parallelism and by data parallelism ({split} ranks), so that rank ({rank}) holds "
        f"other elements than a DTensor with placements {made.placements} describes; torch.distributed.checkpoint "
        f"would lose some of them. Make the size a multiple of {before}, split another dimension by "
        "shard_placement_fn=, or use FullyShardedDataParallel, without state dicts of DTensors"
    )


def mesh_of_both(dp_mesh: Any, other: Any) -> Any:
    """The mesh whose dimensions are those of `dp_mesh`, then those of `other`.

    Raises:
        UsageError: this torch cannot make one; they are not parts of one mesh, or share ranks along some dimension.
    """
    require_dtensors()
    names = f"{dp_mesh.mesh_dim_names or '(unnamed)'} and {other.mesh_dim_names or '(unnamed)'}"
    if dp_mesh.mesh_dim_names is None or other.mesh_dim_names is None:
        raise UsageError(
            f"the meshes of data and tensor parallelism have dimensions {names}: only named dimensions of one mesh "
            'can be combined. Create both with init_device_mesh(..., mesh_dim_names=("dp", "tp")), as mesh["dp"] and '
            'mesh["tp"]'
        )
    if both := [name for name in dp_mesh.mesh_dim_names if name in other.mesh_dim_names]:
        raise UsageError(
            f"the meshes of data and tensor parallelism have dimensions {names}: {both[0]!r} is in both. A parameter "
            'that is a DTensor must be on the dimensions of tensor parallelism only, such as mesh["tp"]; data '
            "parallelism then splits each of its parts"
        )
    try:
        return _dtensor.concatenated([dp_mesh, other])
    except RuntimeError as error:
        raise UsageError(
            f"the meshes of data and tensor parallelism, {names}, are not different dimensions of one mesh: {error}. "
            'Slice both from one init_device_mesh(..., mesh_dim_names=("dp", "tp"))'
        ) from error


def require_dtensors() -> None:
    """Refuse parameters that are DTensors if this torch lacks names that they need."""
    if absent := _dtensor.missing():
        raise UsageError(
            f"parameters that are DTensors need torch 2.13 or newer: torch {torch.__version__} lacks "
            f"{', '.join(absent)}"
        )
