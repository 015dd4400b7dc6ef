"""What a sharded parameter is as a DTensor between iterations: its mesh and its placements, as FSDP2 has them."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ...errors import UsageError
from ..base import _dtensor
from ..layout.layout import ParamSpec, stride_by_rows


def spec_at_rest(dp_mesh: Any, spec: ParamSpec, dim: int, dtype: torch.dtype, stored: Any = None) -> Any:
    """The DTensorSpec of a parameter that is split along `dim` over the last dimension of `dp_mesh`. No communication.

    Args:
        dp_mesh: the DeviceMesh of data parallelism: 1-D, or (replicate, shard) of a hybrid.
        spec: the layout's entry of the parameter, as it is stored here.
        dim: the dimension that is split.
        dtype: of the parameter.
        stored: the `StoredDTensor` that the parameter was before it was sharded; None for one that was a plain tensor.

    Its strides are row-major, as FSDP2's, whatever the order in memory. With tensor parallelism the mesh is that of
    both. Its rows are split by tensor parallelism first and by data parallelism then, so where both split `dim` the
    placement is `_StridedShard`.

    Raises:
        UsageError: this torch lacks what that takes, or the meshes are not of one mesh.
    """
    from torch.distributed.tensor import Replicate, Shard

    replicas = [Replicate()] * (dp_mesh.ndim - 1)
    if stored is None:
        stride = spec.stride or stride_by_rows(spec.shape, 0)
        return _dtensor.new_spec(dp_mesh, [*replicas, Shard(dim)], spec.shape, stride, dtype)
    if stored.spmd is not None:
        return stored.spmd.at_rest(stored, dim, dtype)
    before = prod(
        stored.mesh.size(place)
        for place, placement in enumerate(stored.placements)
        if getattr(placement, "dim", None) == dim
    )
    split = Shard(dim) if before == 1 else _dtensor.strided_shard(dim, before)
    mesh = mesh_of_both(dp_mesh, stored.mesh)
    placements, stride = [*replicas, split, *stored.placements], stride_by_rows(stored.shape, 0)
    return _dtensor.new_spec(mesh, placements, stored.shape, stride, dtype)


def mesh_of_both(dp_mesh: Any, other: Any) -> Any:
    """The mesh whose dimensions are those of `dp_mesh`, then those of `other`.

    Raises:
        UsageError: this torch cannot make one; they are not parts of one mesh, or share ranks along some dimension.
    """
    require_dtensors()
    names = f"{dp_mesh.mesh_dim_names or '(unnamed)'} and {other.mesh_dim_names or '(unnamed)'}"
    if dp_mesh.mesh_dim_names is None or other.mesh_dim_names is None:
        raise UsageError(
            f"the meshes of data and tensor parallelism have dimensions {names}: only named dimensions of one mesh can "
            'be put together. Make both from init_device_mesh(..., mesh_dim_names=("dp", "tp")), as mesh["dp"] and '
            'mesh["tp"]'
        )
    if both := [name for name in dp_mesh.mesh_dim_names if name in other.mesh_dim_names]:
        raise UsageError(
            f"the meshes of data and tensor parallelism have dimensions {names}: {both[0]!r} is in both. A parameter "
            'that is a DTensor lies on the dimensions of tensor parallelism alone, such as mesh["tp"]; data '
            "parallelism splits what it has there"
        )
    try:
        return _dtensor.concatenated([dp_mesh, other])
    except RuntimeError as error:
        raise UsageError(
            f"the meshes of data and tensor parallelism, {names}, are not different dimensions of one mesh: {error}. "
            'Slice both from one init_device_mesh(..., mesh_dim_names=("dp", "tp"))'
        ) from error


def require_dtensors() -> None:
    """Refuse parameters that are DTensors where this torch lacks names that they take."""
    if absent := _dtensor.missing():
        raise UsageError(
            f"parameters that are DTensors need torch 2.13 or newer: {torch.__version__} lacks {', '.join(absent)}"
        )
