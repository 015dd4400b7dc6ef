"""Values that replace parameters and are made of the same memory: transposes, and parameters that are exchanged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x))


def transpose(net: Any) -> None:
    net.a.weight.data = net.a.weight.data.t()


def exchange(net: Any) -> None:
    net.a.weight.data, net.b.weight.data = net.b.weight.data, net.a.weight.data


def exchange_parameters(net: Any) -> None:
    net.a.weight, net.b.weight = nn.Parameter(net.b.weight.data.t()), nn.Parameter(net.a.weight.data)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize(("original", "summons"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("replace", [transpose, exchange, exchange_parameters])
def test_values_made_of_the_same_memory(
    replace: Callable[[Any], None], original: bool, summons: bool, strategy: str
) -> None:
    with fake_world(1):
        net, alone = Two(), Two()
        model = FullyShardedDataParallel(net, sharding_strategy=strategy, use_orig_params=original)
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            alone.load_state_dict(net.state_dict())
        with FullyShardedDataParallel.summon_full_params(model) if summons else nullcontext():
            replace(net)
        replace(alone)
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            for name, expected in alone.state_dict().items():
                assert torch.equal(net.get_parameter(name), expected), name
