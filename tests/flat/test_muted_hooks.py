"""Small gradients that wait in the leaves for the others of their unit, while the engine's hooks there are muted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, fully_shard
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process


class Net(nn.Module):
    """A layer whose bias is read at the beginning, by an operation without the input, and a weight through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        shift = self.two.bias.exp()
        out: Tensor = torch.tanh(self.one(x)) @ self.two.weight.t().contiguous() + shift
        return out + x @ self.one.weight.mT.sin()


def sharded(front: str) -> tuple[nn.Module, nn.Module]:
    """A model of two such units without sharding, and the same with."""
    torch.manual_seed(0)
    plain = nn.Sequential(Net(), Net())
    if front == "fully_shard":
        made = copy.deepcopy(plain)
        for each in (*made, made):
            fully_shard(each)
        return plain, made
    return plain, FullyShardedDataParallel(
        copy.deepcopy(plain), auto_wrap_policy={Net}, use_orig_params=front == "original"
    )


def gradients(front: str, model: nn.Module) -> list[Tensor]:
    if front == "flat":
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    found: list[Any] = [parameter.grad for parameter in model.parameters()]
    return [each.full_tensor() if front == "fully_shard" else each for each in found]


FRONTS = ["flat", "original", "fully_shard"]


@pytest.mark.parametrize("front", FRONTS)
def test_gradients_that_come_before_and_after_those_of_inputs(front: str) -> None:
    with fake_world(1):
        plain, model = sharded(front)
        for _ in range(3):
            x = torch.randn(3, 4)
            for each in (plain, model):
                each(x).square().sum().backward()
            expected = [parameter.grad for parameter in plain.parameters()]
            found = gradients(front, model)
            torch.testing.assert_close([each.view(-1) for each in found], [each.view(-1) for each in expected])
            plain.zero_grad()
            model.zero_grad()


@pytest.mark.parametrize("front", FRONTS)
def test_backward_hooks_of_modules_meet_no_gradients_that_are_not_reduced(front: str) -> None:
    """They would change this rank's contribution only."""
    seen: list[int] = []

    def hook(module: nn.Module, *_: Any) -> None:
        grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        seen.append(len(grads))
        for each in grads:
            each.zero_()

    with fake_world(1):
        plain, model = sharded(front)
        for step in range(3):
            x = torch.randn(3, 4)
            if step:
                layer = next(module for module in model.modules() if type(module) is nn.Linear)
                layer.register_full_backward_hook(hook)
            for each in (plain, model):
                each(x).square().sum().backward()
            found = gradients(front, model)
            expected = [parameter.grad for parameter in plain.parameters()]
            torch.testing.assert_close([each.view(-1) for each in found], [each.view(-1) for each in expected])
            plain.zero_grad()
            model.zero_grad()
    assert seen and not any(seen)
