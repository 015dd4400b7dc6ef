"""Private leaves for original parameters (a switch, until they are the only way): the same bits, and the user's
parameters are the shard at any time."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.corners import Net, data, full_parameters, loss_of, seeded

pytestmark = pytest.mark.distributed

SWITCH = "FLATFSDP_TWO_LIVES"


def wrapped(**options: Any) -> Any:
    net = seeded(Net)
    for i, block in enumerate(net.blocks):
        net.blocks[i] = FullyShardedDataParallel(block, use_orig_params=True, **options)
    return FullyShardedDataParallel(net, use_orig_params=True, **options)


def trained(rank: int, steps: int = 3, **options: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Any]:
    """The losses, the whole parameters and the model."""
    model = wrapped(**options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        with model.no_sync():
            loss_of(model(data(rank, step, 0))).backward()
        loss = loss_of(model(data(rank, step, 1)))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, full_parameters(model), model


def both_ways(rank: int, world: int, options: dict[str, Any]) -> bool:
    os.environ.pop(SWITCH, None)
    losses, parameters, _ = trained(rank, **options)
    os.environ[SWITCH] = "1"
    try:
        others, found, _ = trained(rank, **options)
    finally:
        del os.environ[SWITCH]
    same = all(torch.equal(found[name], each) for name, each in parameters.items())
    return same and all(map(torch.equal, losses, others))


@pytest.mark.parametrize("options", [{}, {"sharding_strategy": "SHARD_GRAD_OP"}], ids=["FULL_SHARD", "SHARD_GRAD_OP"])
def test_the_same_bits(options: dict[str, Any], pool2: Run) -> None:
    assert pool2(both_ways, options) == [True, True]


class _Looks(nn.Module):
    """Records what its weight is, and what the user's is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.user: list[nn.Parameter] = []
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner.weight
        try:
            self.user[0].sum()
            refused = False
        except UsageError:
            refused = True
        self.seen.append((weight is self.user[0], tuple(weight.shape), self.user[0].dim(), refused))
        return self.inner(x)


def looked(rank: int, world: int) -> list[Any]:
    os.environ[SWITCH] = "1"
    try:
        net = _Looks()
        before = [*net.parameters()]
        before[0].no_decay = True  # type: ignore[attr-defined]
        model = FullyShardedDataParallel(net, use_orig_params=True)
        net.user = before[:1]
        hooked: list[torch.Size] = []
        before[0].register_hook(lambda grad: hooked.append(grad.shape))
        same = [all(a is b for a, b in zip(before, model.parameters(), strict=True))]
        model(torch.ones(2, 6)).sum().backward()
        same.append(all(a is b for a, b in zip(before, model.parameters(), strict=True)))
        grads = sum(each.grad.numel() for each in before if each.grad is not None)
        with FullyShardedDataParallel.summon_full_params(model):
            whole = [tuple(each.shape) for each in before]
        twin = copy.deepcopy(model)
        marked = next(twin.parameters()).no_decay
        return [same, net.seen, grads, hooked == [(6, 6)], whole, marked]
    finally:
        del os.environ[SWITCH]


def test_the_users_parameter_is_the_shard_at_any_time(pool2: Run) -> None:
    found = pool2(looked)
    seen = [(False, (6, 6), 1, True)]
    assert [each[:2] + each[3:] for each in found] == [[[True, True], seen, True, [(6, 6), (6,)], True]] * 2
    assert sum(each[2] for each in found) == 42
