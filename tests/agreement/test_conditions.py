"""Conditions that no message shows and that change a model's result: an optimizer step, a loaded state dict, autocast,
parameters that are frozen for a forward. A difference on one rank is an error on all."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel
from tests.agreement.test_agreement import message_of, same
from tests.conftest import Run
from tests.flat.test_requires_grad import batch, wrapped

pytestmark = pytest.mark.distributed

ALIKE = {  # where ranks differ in the key they all do the value, too, so that none of them waits in a collective
    "steps": "loads",
    "loads": "steps",
    "loads its optimizer": "steps",
    "autocast": "steps",
    "freezes": "steps",
}


def train(model: nn.Module, inputs: torch.Tensor, things: set[str]) -> None:
    parameter = next(iter(model.parameters()))
    if "freezes" in things:
        parameter.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16) if "autocast" in things else contextlib.nullcontext():
        output = model(inputs)
    parameter.requires_grad_(True)
    output.float().square().mean().backward()


def prepare(model: Any, optimizer: torch.optim.Optimizer, things: set[str]) -> None:
    if "steps" in things:
        optimizer.step()
    if "loads" in things:
        with FullyShardedDataParallel.state_dict_type(model, "LOCAL_STATE_DICT"):
            model.load_state_dict(copy.deepcopy(model.state_dict()))
    if "loads its optimizer" in things:
        optimizer.load_state_dict(optimizer.state_dict())


def unlike(rank: int, world: int, thing: str, strategy: str, at_first: bool) -> str:
    model = wrapped(strategy, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    things = {ALIKE[thing]} if not at_first else set()
    if not at_first:
        train(model, batch(rank, 0), set())
    if rank == world - 1:
        things.add(thing)
    prepare(model, optimizer, things)
    return message_of(lambda: train(model, batch(rank, 1), things))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize(
    ("thing", "text"),
    [
        ("steps", "Rank 1 took an optimizer step since the previous step; rank 0 did not. "),
        ("loads", "Rank 1 loaded a state dict since the previous step; rank 0 did not. "),
        ("loads its optimizer", "Rank 1 loaded a state dict since the previous step; rank 0 did not. "),
        ("autocast", "Autocast is off on rank 0, and computes in bfloat16 on rank 1. "),
        ("freezes", "Parameter 'first.weight' requires a gradient on rank 0, but not on rank 1. "),
    ],
)
def test_what_one_rank_does_is_an_error_on_all(pool2: Run, thing: str, text: str, strategy: str) -> None:
    assert text in same(pool2(unlike, thing, strategy, False))


def test_a_state_dict_that_one_rank_loads_at_first(pool2: Run) -> None:
    assert "Rank 1 loaded a state dict" in same(pool2(unlike, "loads", "FULL_SHARD", True))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(4, 4), nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale(torch.ones(1))


def step_what_is_held(rank: int, world: int) -> bool:
    """One optimizer for each part, over the tensors that this rank holds of it, each stepped in its turn."""
    model = FullyShardedDataParallel(Scaled(), auto_wrap_policy={nn.Linear}, use_orig_params=True)
    held = [[p for p in part.parameters() if p.numel()] for part in (model.module.linear, model.module.scale)]
    assert bool(held[1]) == (rank == 0)
    optimizers = [torch.optim.SGD(parameters, lr=0.1) if parameters else None for parameters in held]
    for step in range(6):
        model(batch(rank, step)).sum().backward()
        if (optimizer := optimizers[step % 2]) is not None:
            optimizer.step()
        model.zero_grad()
    return True


def test_a_rank_without_elements_of_what_is_stepped_need_not_step(pool2: Run) -> None:
    assert all(pool2(step_what_is_held))
