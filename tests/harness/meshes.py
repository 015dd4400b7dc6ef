"""Meshes of a pool's ranks whose process groups all jobs share.

Groups of gloo are connected pair by pair, and each keeps its sockets and threads for the life of the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@lru_cache(maxsize=8)
def shared_mesh(*shape: int) -> DeviceMesh:
    """A mesh of this worker's world, made at the first call. Collective."""
    return dist.init_device_mesh("cpu", shape)


def replicas_of_shards() -> DeviceMesh:
    """The mesh of the hybrid strategies: two replicas. Collective at the first call."""
    return shared_mesh(2, dist.get_world_size() // 2)


@lru_cache(maxsize=8)
def named_mesh(*shape: int) -> DeviceMesh:
    """A mesh with names of axes, which `fully_shard` requires for a hybrid. Collective at the first call."""
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def adamw(parameters: Iterable[Any], lr: float = 1e-2) -> torch.optim.Optimizer:
    """AdamW whose step is one operation for all plain parameters of a mesh. It is ten for each parameter otherwise, and
    torch takes 10 ms for each operation on DTensors of a new shape to find how it is computed."""
    groups: dict[Any, list[Any]] = {}
    for each in parameters:
        plain = type(getattr(each, "_local_tensor", each)) in (torch.Tensor, torch.nn.Parameter)
        groups.setdefault((getattr(each, "device_mesh", None), plain), []).append(each)
    return torch.optim.AdamW([{"params": each, "fused": plain} for (_, plain), each in groups.items()], lr=lr)
