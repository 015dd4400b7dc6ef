"""Models that share some of their process groups, and not all of their ranks: any order that ranks share.
`test_shared_groups_in_other_orders.py` has the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatfsdp
from tests.agreement.test_agreement import Net, step, wrap
from tests.conftest import Run
from tests.harness import inspect

pytestmark = pytest.mark.distributed

Mesh = Any


def hybrid(mesh: Mesh) -> nn.Module:
    return wrap(Net(), sharding_strategy="HYBRID_SHARD", device_mesh=mesh)


def hybrid_of_fully_shard(mesh: Mesh) -> nn.Module:
    return flatfsdp.fully_shard(Net(), mesh=mesh)


def of_fully_shard(mesh: Mesh) -> nn.Module:
    return flatfsdp.fully_shard(Net(), mesh=mesh["replicas"])


def over_replicas(mesh: Mesh) -> nn.Module:
    return wrap(Net(), process_group=mesh.get_group("replicas"))


def over_shards(mesh: Mesh) -> nn.Module:
    return wrap(Net(), process_group=mesh.get_group("shards"))


def with_a_unit_apart(mesh: Mesh) -> nn.Module:
    """One of its units is spread over the other group."""
    net = Net()
    net.blocks[1] = wrap(net.blocks[1], process_group=mesh.get_group("replicas"), auto_wrap_policy=None)
    return wrap(net, process_group=mesh.get_group("shards"))


# Models of one class, so that nothing but the turns tells them apart.
WORLDS: dict[str, tuple[Callable[[Mesh], nn.Module], Callable[[Mesh], nn.Module]]] = {
    "replicas": (hybrid, hybrid),
    "replicas beside shards over their group": (hybrid_of_fully_shard, of_fully_shard),
    "shards beside replicas": (over_shards, hybrid),
    "a unit's own group": (over_replicas, with_a_unit_apart),
    "own groups of units": (with_a_unit_apart, with_a_unit_apart),
    "stages of a pipeline": (over_replicas, over_replicas),
}


def built(world: str) -> list[nn.Module]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    return [make(mesh) for make in WORLDS[world]]


def accumulate(model: Any) -> None:
    """A step without reductions."""
    if isinstance(model, flatfsdp.FullyShardedDataParallel):
        with model.no_sync():
            step(model)
    else:
        model.set_requires_gradient_sync(False)
        step(model)
        model.set_requires_gradient_sync(True)


def alike(rank: int, ranks: int, world: str) -> None:
    """Backwards under `no_sync()` before those of the other model, and one backward through both, included."""
    first, second = built(world)
    for index in range(5):
        accumulate(first)
        for model in (first, second, first) if index % 3 else (second, first):
            step(model)
        outputs = [model(torch.ones(2, 4)).sum() for model in (first, second)]
        (outputs[0] * outputs[1]).backward()


@pytest.mark.parametrize("world", WORLDS)
def test_models_may_be_called_in_any_order_that_ranks_share(pool4: Run, world: str) -> None:
    pool4(alike, world)


def through_a_frozen_model(rank: int, ranks: int) -> list[int]:
    """What is kept for comparisons, after each of several steps."""
    torch.manual_seed(0)
    trained, frozen = wrap(Net()), wrap(Net().requires_grad_(False))
    kept = []
    for _ in range(6):
        x = torch.ones(2, 4, requires_grad=True)
        trained(frozen(x)).sum().backward()
        kept.append(inspect.issued_in_common(trained))
    return kept


def test_steps_through_a_model_that_reduces_nothing_keep_nothing_more(pool2: Run) -> None:
    for kept in pool2(through_a_frozen_model):
        assert len(set(kept[2:])) == 1, kept
