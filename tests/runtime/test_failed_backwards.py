"""`.grad` after a backward that failed and that autograd has not released, as on accelerators; `zero_grad()` holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from tests.harness.delayed import backwards_released_late
from tests.harness.fake import fake_world
from tests.harness.fake_device import FakeDevice

pytestmark = pytest.mark.single_process

CAST = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)}
FRONTS: dict[str, dict[str, Any] | None] = {
    "original": {"use_orig_params": True},
    "original-SHARD_GRAD_OP": {"use_orig_params": True, "sharding_strategy": "SHARD_GRAD_OP"},
    "original-NO_SHARD-cast": {"use_orig_params": True, "sharding_strategy": "NO_SHARD", **CAST},
    "flat": {"use_orig_params": False},
    "flat-NO_SHARD": {"use_orig_params": False, "sharding_strategy": "NO_SHARD"},
    "fully_shard": None,
}


class Net(nn.Module):
    """Two layers, with a trap between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.register_hook(self.trap)
        return self.second(hidden)

    def trap(self, grad: Tensor) -> None:
        if self.fails:
            raise ZeroDivisionError


def built(net: Net, front: dict[str, Any] | None) -> Any:
    if front is not None:
        return FullyShardedDataParallel(net, auto_wrap_policy={nn.Linear}, **front)
    fully_shard(net.first)
    fully_shard(net.second)
    return fully_shard(net)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("front", FRONTS.values(), ids=FRONTS.keys())
def test_zero_grad_holds_at_once_after_a_failed_backward(front: dict[str, Any] | None, to_none: bool) -> None:
    held: list[object] = []  # what autograd releases later
    with fake_world(2), FakeDevice(), backwards_released_late(held):
        net = Net()
        model = built(net, front)
        model(torch.ones(1, 4)).sum().backward()
        users = [*model.parameters()]
        before = [parameter.grad for parameter in users]
        assert any(each is not None for each in before)
        loss = model(torch.ones(1, 4)).sum()
        net.fails = True
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        for parameter, grad in zip(users, before, strict=True):
            assert parameter.grad is grad
        model.zero_grad(set_to_none=to_none)
        held.clear()
        for parameter, grad in zip(users, before, strict=True):
            assert parameter.grad is (None if to_none else grad)
            assert parameter.grad is None or not parameter.grad.any()
        net.fails = False
        model(torch.ones(1, 4)).sum().backward()
        assert any(each.grad is not None for each in users)
