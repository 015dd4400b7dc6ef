"""The classes that users' parameters have in a step: their own, and few that are derived from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import flatfsdp
from flatfsdp import FullyShardedDataParallel
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

MOST = 2  # classes of the engine's own for one parameter
SETTINGS: dict[str, dict[str, Any]] = {
    "original": {"use_orig_params": True},
    "original, kept": {"use_orig_params": True, "sharding_strategy": flatfsdp.ShardingStrategy.SHARD_GRAD_OP},
    "original, replicated": {"use_orig_params": True, "sharding_strategy": flatfsdp.ShardingStrategy.NO_SHARD},
    "flat": {"use_orig_params": False},
    "fully_shard": {},
}


class Marked(nn.Parameter):
    """A user's class."""


def net() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    made[0].weight = Marked(torch.ones(8, 4))
    return made


def sharded(module: nn.Sequential, group: Any, settings: dict[str, Any]) -> nn.Module:
    if settings:
        module[2] = FullyShardedDataParallel(module[2], process_group=group, **settings)
        return FullyShardedDataParallel(module, process_group=group, **settings)
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
    for each in (module[2], module):
        flatfsdp.fully_shard(each, mesh=mesh)
    return module


@pytest.mark.parametrize("case", SETTINGS)
def test_few_classes_in_a_step(case: str) -> None:
    with fake_world(2) as group:
        module = net()
        users = [*module.parameters()]
        before = [type(each) for each in users]
        model = sharded(module, group, SETTINGS[case])
        objects = [*users, *(each for each in model.parameters() if all(each is not one for one in users))]
        seen: defaultdict[int, set[type]] = defaultdict(set)
        points: set[str] = set()

        def look(point: str) -> Callable[..., None]:
            def note(*_: Any) -> None:
                points.add(point)
                for each in objects:
                    seen[id(each)].add(type(each))

            return note

        look("built")()
        for inner in (module[0], module[1]):
            inner.register_forward_hook(look("in the forward"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = model(torch.ones(3, 4)).sum()
            loss.register_hook(look("in the backward"))
            look("after the forward")()
            loss.backward()
            look("after the backward")()
            optimizer.step()
            look("stepped")()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(3, 4))
            look("evaluated")()
        assert len(points) == 7
        for each in objects:
            assert len(seen[id(each)] - {Marked, nn.Parameter, DTensor}) <= MOST, seen[id(each)]
        for each, cls in zip(users, before, strict=True):
            assert all(issubclass(found, cls) for found in seen[id(each)]), (cls, seen[id(each)])
        guarded = any(seen[id(each)] != {cls} for each, cls in zip(users, before, strict=True))
        assert guarded == (case != "original, replicated"), seen.values()
