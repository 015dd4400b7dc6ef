"""Units inside torch's `replicate` and DistributedDataParallel: as with torch's `fully_shard`, or refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel

import flatfsdp
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.meshes import named_mesh

pytestmark = pytest.mark.distributed


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def front(model: Any, wrapped: bool, **options: Any) -> None:
    if wrapped:
        model[0] = flatfsdp.FullyShardedDataParallel(model[0], use_orig_params=True)
    else:
        flatfsdp.fully_shard(model[0], **options)


def replicated(rank: int, world: int, wrapped: bool) -> list[float]:
    model, plain = net(), net()
    front(model, wrapped)
    replicate(model)
    its, others = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model))
    for number in range(3):
        batches = torch.randn(world, 2, 6, generator=torch.Generator().manual_seed(number))
        plain(batches).square().mean().backward()
        model(batches[rank]).square().mean().backward()
        for each in (its, others):
            each.step()
            each.zero_grad()
    batch = torch.ones(1, 6)
    return [float((model(batch) - plain(batch)).abs().max()), float((model[2].weight - plain[2].weight).abs().max())]


@pytest.mark.parametrize("wrapped", [False, True])
def test_replicate_reduces_the_rest(wrapped: bool, pool2: Run) -> None:
    assert all(each < 1e-6 for found in pool2(replicated, wrapped, timeout=120) for each in found)


def refused(rank: int, world: int, wrapped: bool) -> None:
    model = net()
    front(model, wrapped)
    with pytest.raises(UsageError, match=r"its module 0 .Linear. is sharded by flatfsdp.*2-D mesh"):
        DistributedDataParallel(model)
    ignored = [name for name, _ in model.named_parameters() if name.startswith("0")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    DistributedDataParallel(model)(torch.ones(1, 6)).sum().backward()
    assert model[2].weight.grad is not None


@pytest.mark.parametrize("wrapped", [False, True])
def test_ddp_is_refused_unless_it_ignores_them(wrapped: bool, pool2: Run) -> None:
    pool2(refused, wrapped, timeout=120)


def too_late(rank: int, world: int) -> None:
    model = net()
    outer = DistributedDataParallel(model)
    flatfsdp.fully_shard(model[0])
    with pytest.raises(UsageError, match="is sharded by flatfsdp"):
        outer(torch.ones(1, 6))


def test_units_made_inside_a_ddp_are_refused(pool2: Run) -> None:
    pool2(too_late, timeout=120)


def across(rank: int, world: int) -> None:
    model, mesh = net(), named_mesh(2, 2)
    names = mesh.mesh_dim_names
    assert names is not None
    flatfsdp.fully_shard(model[0], mesh=mesh[names[1]])
    replicate(model, device_mesh=mesh[names[0]])
    with pytest.raises(UsageError, match=r"inside replicate.. over ranks .*is itself sharded over ranks .*2-D mesh"):
        model(torch.ones(1, 6))


def test_replicate_across_the_ranks_of_a_unit_is_refused(pool4: Run) -> None:
    pool4(across, timeout=120)
