"""Penalties over parameters before a forward that are no error: each rank adds the elements of its own shard."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel
from tests.conftest import Run

pytestmark = pytest.mark.distributed


def _gradient(rank: int, strategy: str, first: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient and value of the flat parameter, where steps add a penalty from `first` on."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model = FullyShardedDataParallel(net, sharding_strategy=strategy)
    for step in range(3):
        model.zero_grad()
        adds = first is not None and step >= first
        penalty = sum(parameter.square().sum() for parameter in model.parameters()) if adds else 0.0
        (model(torch.full((2, 4), rank + 1.0)).sum() + penalty).backward()
    (flat,) = model.parameters()
    assert flat.grad is not None
    return flat.grad.clone(), flat.detach().clone()


def _added(rank: int, world: int, strategy: str, first: int) -> bool:
    without, _ = _gradient(rank, strategy, None)
    found, values = _gradient(rank, strategy, first)
    return torch.allclose(found, without + 2.0 * values)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("first", [0, 2])
def test_flat_parameters_take_one_of_this_ranks_shard(strategy: str, first: int, pool2: Run) -> None:
    assert pool2(_added, strategy, first) == [True, True]
