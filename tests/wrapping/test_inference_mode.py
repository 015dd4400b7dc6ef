"""Modules that are sharded, moved and called inside of `torch.inference_mode()` train outside of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel, fully_shard
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process


@pytest.mark.parametrize(
    "shard",
    [
        partial(FullyShardedDataParallel, use_orig_params=True),
        partial(FullyShardedDataParallel, auto_wrap_policy={nn.Linear}),
        fully_shard,
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_sharding_in_inference_mode(shard: Callable[[nn.Module], Any], device: str, ranks: int) -> None:
    x = torch.ones(1, 4)
    with torch.device(device):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with fake_world(ranks):
        with torch.inference_mode():
            model = shard(net)
            if device == "meta" and shard is fully_shard:
                model.to_empty(device="cpu")
            model.double()
            before = model(x.double()).clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.float()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        assert ranks > 1 or device == "meta" or torch.allclose(loss.double(), before)
        model(x).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters() if parameter.numel())


@pytest.mark.parametrize(
    "shard", [partial(FullyShardedDataParallel, use_orig_params=True), FullyShardedDataParallel, fully_shard]
)
def test_assigned_values_that_a_forward_in_inference_mode_takes_over(shard: Callable[[nn.Module], Any]) -> None:
    x = torch.ones(1, 4)
    with fake_world(1):
        model, alone = (
            shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))),
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
        )
        for parameter in (*model.parameters(), *alone.parameters()):
            parameter.data = torch.full_like(parameter.data, 0.5)
        with torch.inference_mode():
            assert torch.equal(model(x), alone(x))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
        for _ in range(2):
            for each, optimizer in zip((model, alone), optimizers, strict=True):
                each(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert torch.equal(model(x), alone(x))
