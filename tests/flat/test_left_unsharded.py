"""Terms over parameters that stay whole between forward and backward: as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from tests.conftest import Run

pytestmark = pytest.mark.distributed

WIDTH = 5
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH))


def loss_of(model: nn.Module, weight: nn.Parameter, bias: nn.Parameter, x: Tensor) -> Tensor:
    """With a penalty, and with a head that computes with the same weights."""
    y = model(x)
    return y.float().mean() + weight.square().sum() + F.linear(y.to(weight.sum().dtype), weight, bias).float().mean()


def penalized(rank: int, world: int, settings: dict[str, Any]) -> list[str]:
    alone, wrong = net(), []
    inner = copy.deepcopy(alone)
    policy = None if settings["sharding_strategy"] == "FULL_SHARD" else {nn.Linear}
    near = 2e-2 if "mixed_precision" in settings else 1e-5
    model: Any = FullyShardedDataParallel(inner, auto_wrap_policy=policy, use_orig_params=True, **settings)
    head = inner[0] if policy is None else inner[0].module
    for step in range(2):
        data = torch.randn(world, 3, WIDTH, generator=torch.Generator().manual_seed(step))
        loss_of(model, head.weight, head.bias, data[rank]).backward()
        for x in data:
            (loss_of(alone, alone[0].weight, alone[0].bias, x) / world).backward()
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            for (name, expected), found in zip(alone.named_parameters(), model.parameters(), strict=True):
                if not torch.allclose(found.grad, expected.grad, rtol=near, atol=near):
                    wrong.append(f"{step} {name}: {(found.grad - expected.grad).abs().max():.1e}")
    return wrong


@pytest.mark.parametrize(
    "settings",
    [
        {"sharding_strategy": "FULL_SHARD"},
        {"sharding_strategy": "FULL_SHARD", "mixed_precision": BF16},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": BF16},
        {"sharding_strategy": "NO_SHARD"},
        {"sharding_strategy": "NO_SHARD", "mixed_precision": BF16},
        {"sharding_strategy": "NO_SHARD", "cpu_offload": CPUOffload(offload_params=True)},
    ],
    ids=lambda settings: "-".join(map(str, (settings["sharding_strategy"], *list(settings)[1:]))),
)
def test_terms_over_whole_parameters(pool2: Run, settings: dict[str, Any]) -> None:
    assert pool2(penalized, settings) == [[], []]
