"""Sizes at which no DTensor placement describes the ranks' rows: torch's distributed checkpoint would lose some."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from flatfsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType, fully_shard
from flatfsdp.errors import UsageError
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

REFUSED = r"of shape \(7, \d+\): its 7 elements of dimension 0 .*\(3 x 2 ranks\).* rank \(dp 2, tp 0\)"


def split(rows: int) -> tuple[nn.Module, DeviceMesh]:
    """A layer whose rows tensor parallelism has split, and the mesh."""
    mesh = dist.init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    width = 4 + dist.get_rank()  # torch keeps meshes, which know their rank, by the shapes of tensors
    layer = nn.Linear(width, rows, bias=False)
    local = torch.ones(rows, width).chunk(2)[mesh["tp"].get_local_rank()]
    made = DTensor.from_local(local, mesh["tp"], [Shard(0)], run_check=False, shape=(rows, width), stride=(width, 1))
    layer.weight = nn.Parameter(made)
    return layer, mesh


@pytest.mark.parametrize("rank", range(6))
def test_they_are_refused_by_every_rank(rank: int) -> None:
    with fake_world(6, rank=rank):
        layer, mesh = split(7)
        with pytest.raises(UsageError, match=f"'weight' {REFUSED}.*a multiple of 2, .*shard_placement_fn="):
            fully_shard(layer, mesh=mesh["dp"])


@pytest.mark.parametrize("rank", [0, 5])
def test_others_and_other_dimensions_are_not(rank: int) -> None:
    with fake_world(6, rank=rank):
        layer, mesh = split(8)
        fully_shard(layer, mesh=mesh["dp"])
        layer, mesh = split(7)
        fully_shard(layer, mesh=mesh["dp"], shard_placement_fn=lambda parameter: Shard(1))


def test_state_dicts_of_the_wrapper_are_refused_that_would_have_them_as_dtensors() -> None:
    with fake_world(6, rank=5):
        layer, mesh = split(7)
        model = FullyShardedDataParallel(layer, device_mesh=mesh["dp"], use_orig_params=True)
        for carrier in ("interval", "dtensor"):
            config = ShardedStateDictConfig(sharded_as=carrier)
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
                if carrier == "interval":
                    assert model.state_dict()["weight"].boxes[0].sizes == (1, 9)
                    continue
                with pytest.raises(UsageError, match=REFUSED):
                    model.state_dict()
