"""Parameters that were different objects over one memory train as in one process, after they are tied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.thorough import spread
from tests.harness.three_fronts import FRONTS, sharded, unlike, whole_values

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.w(x))


class Net(nn.Module):
    """Its parts share memory: `how` says which."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.o = Block(), Block(), nn.Linear(6, 6, bias=False), nn.Linear(6, 1)
        w = torch.randn(6, 18) / 3
        if how == "one unit":
            self.c.weight.data = self.o.weight.data.expand(6, 6).clone()
            self.d = nn.Linear(6, 6, bias=False)
            self.d.weight.data = self.c.weight.data
        if how == "two units":
            self.b.w.weight.data = self.a.w.weight.data
        if how == "a unit and the root":
            self.c.weight.data = self.a.w.weight.data
        if how == "disjoint":
            for part, module in enumerate((self.a.w, self.b.w, self.c)):
                module.weight = nn.Parameter(w[:, 6 * part : 6 * part + 6])

    def forward(self, x: Tensor) -> Any:
        x = self.c(self.b(self.a(x)))
        return self.o(torch.tanh(self.d(x) if hasattr(self, "d") else x))


HOWS = ("one unit", "two units", "a unit and the root", "disjoint")


def train(model: nn.Module, rank: int, world: int) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for x in torch.randn(4, 12, 6, generator=torch.Generator().manual_seed(3)):
        optimizer.zero_grad()
        model(x.chunk(world)[rank]).pow(2).mean().backward()
        optimizer.step()
    return model


def trained(rank: int, world: int, front: str, **options: Any) -> list[str]:
    lines = []
    for how in HOWS:
        alone: Any = train(Net(how), 0, 1)
        if how == "one unit":
            alone.d.weight = alone.c.weight
        if how == "two units":
            alone.b.w.weight = alone.a.w.weight
        if how == "a unit and the root":
            alone.c.weight = alone.a.w.weight
        expected = {name: parameter.detach() for name, parameter in alone.named_parameters()}
        try:
            model = sharded(front, Net(how), (Block,), **options)
        except UsageError as error:
            if not (front == "fully_shard" and how in ("two units", "a unit and the root")):
                lines.append(f"{how}: {error}")
            continue
        twin = copy.deepcopy(model)
        for each in (model, twin):
            lines += [f"{how} {line}" for line in unlike(whole_values(front, train(each, rank, world)), expected)]
    return lines


@pytest.mark.parametrize(("world", "front"), spread([2, 3], FRONTS))
def test_trains_as_in_one_process(run: Run, world: int, front: str) -> None:
    for lines in run(world, trained, front):
        assert not lines, "\n".join(lines)


@pytest.mark.parametrize("front", ["flat", "original"])
def test_so_it_does_where_nothing_is_sharded(pool2: Run, front: str) -> None:
    for lines in pool2(trained, front, sharding_strategy="NO_SHARD"):
        assert not lines, "\n".join(lines)
