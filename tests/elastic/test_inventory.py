"""The kept inventory is what a rank has: the same tensors from step to step, and others as soon as others have it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel
from flatfsdp.elastic import inventory as inventories
from flatfsdp.elastic.holding import Facts, Holding
from flatfsdp.elastic.inventory import Inventory
from tests.harness import pool

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("calls", torch.zeros(3))
        self.loose = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.second(self.first(x).relu()) * self.loose


def follow(rank: int, world: int, front: str) -> list[tuple[str, bool]]:
    """What changes, and whether the elements are found anew then."""
    torch.manual_seed(0)
    net = Net()
    if front == "fully_shard":
        for module in (net.first, net.second):
            flatfsdp.fully_shard(module)
        model: Any = flatfsdp.fully_shard(net, ignored_params={net.loose})
    else:
        model = FullyShardedDataParallel(
            net, auto_wrap_policy={nn.Linear}, use_orig_params=front == "originals", ignored_states=[net.loose]
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    kept, found, calls = Inventory(model, optimizer), [], []

    def counted(*args: Any) -> Holding:
        calls.append(args)
        return Holding.of(*args)

    def look(what: str) -> None:
        calls.clear()
        here, expected = kept.holding(), Holding.of(model, optimizer)
        assert here.facts.entries == expected.facts.entries and here.facts.groups == expected.facts.groups
        assert repr(here.facts.values) == repr(expected.facts.values)
        for one, other in zip(here.tensors, expected.tensors, strict=True):
            assert torch.equal(one, other)
        assert repr(Facts.decoded(kept.encoded(here.facts))) == repr(here.facts)
        found.append((what, bool(calls)))

    def step() -> None:
        model(torch.full((2, 6), 1.0 + rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    inventories.Holding = type("Counted", (), {"of": counted, "__new__": lambda cls, *args: Holding(*args)})  # type: ignore
    try:
        look("first")
        step()
        look("states")
        for _ in range(2):
            step()
            look("step")
        optimizer.param_groups[0]["lr"] = 0.01
        look("setting")
        net.calls = net.calls.clone()
        look("buffer")
        net.calls.data = net.calls.clone()
        look("memory of a buffer")
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        look("loaded states")
        step()
        look("step")
        kept.forget()
        look("forgotten")
    finally:
        inventories.Holding = Holding  # type: ignore
    return found


@pytest.mark.parametrize("front", ["originals", "flat", "fully_shard"])
def test_what_a_rank_has_is_found_anew_when_other_tensors_have_it(front: str) -> None:
    anew = ("first", "states", "buffer", "memory of a buffer", "loaded states", "forgotten")
    for found in pool.run(2, follow, front):
        assert found == [(what, what in anew) for what, _ in found] and len(found) == 10
