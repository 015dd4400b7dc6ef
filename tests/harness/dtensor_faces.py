"""Wrappers whose parameters are DTensors of rows at rest, as those of `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import nn

import flatfsdp.fully_sharded_data_parallel as facade
from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.dtensor.dtensor_face import DTensorFaces
from flatfsdp.engine.wrapping.build import Front, build_unit


@contextmanager
def dtensor_faces(mesh: Any) -> Iterator[None]:
    """Inside, wrappers hold their parameters in that form, over `mesh`."""
    face = DTensorFaces(mesh)
    front = Front(faces=lambda transformed, leaves, unit_mesh: face)
    with patch.object(facade, "build_unit", partial(build_unit, front=front)):
        yield


def wrapped(module: nn.Module, mesh: Any, **options: Any) -> FullyShardedDataParallel:
    """`module` wrapped with such parameters; a 2-D `mesh` means a hybrid."""
    strategy = "HYBRID_SHARD" if mesh.ndim == 2 else "FULL_SHARD"
    given = {"use_orig_params": True, "layout": "rows", "device_mesh": mesh, "sharding_strategy": strategy}
    with dtensor_faces(mesh):
        return FullyShardedDataParallel(module, **(given | options))
