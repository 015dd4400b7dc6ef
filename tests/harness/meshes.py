"""Meshes of a pool's ranks whose process groups all jobs share.

Groups of gloo are connected pair by pair, and each keeps its sockets and threads for the life of the process.
"""

from __future__ import annotations

from functools import lru_cache

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
