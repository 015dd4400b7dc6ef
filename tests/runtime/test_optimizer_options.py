"""Options of optimizers that differ between ranks are a warning at the first step, once in a job."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import optimizer_in_backward
from flatfsdp.engine.guards.optimizer_options import differences
from flatfsdp.errors import FlatFSDPWarning
from tests.conftest import Run
from tests.harness.models import WIDTH, Feedforward
from tests.harness.thorough import spread
from tests.harness.three_fronts import FRONTS, sharded

pytestmark = pytest.mark.distributed

Make = Callable[[int, list[nn.Parameter]], list[torch.optim.Optimizer]]


def model_of(front: str) -> nn.Module:
    torch.manual_seed(0)
    return sharded(front, nn.Sequential(Feedforward(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), (Feedforward,))


def stepped(rank: int, world: int, front: str, case: str, steps: int = 2) -> list[str]:
    model = model_of(front)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if case == "in a backward":
            optimizer_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1 + (rank == 1)))
            optimizers: list[torch.optim.Optimizer] = []
        else:
            optimizers = CASES[case](rank, list(model.parameters()))
        for _ in range(steps):
            model(torch.ones(2, WIDTH)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [str(each.message) for each in caught if issubclass(each.category, FlatFSDPWarning)]


def one(kind: Any, options: Callable[[int], dict[str, Any]]) -> Make:
    return lambda rank, parameters: [kind(parameters, **options(rank))]


def two_in_an_order(rank: int, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    made = [torch.optim.SGD(parameters[:1], lr=0.1), torch.optim.SGD(parameters[1:], lr=0.2)]
    return made[:: 1 if rank else -1]


def in_groups(rank: int, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.2}]
    return [torch.optim.SGD(groups[:: 1 if rank else -1])]


CASES: dict[str, Make] = {
    "lr": one(torch.optim.SGD, lambda rank: {"lr": 0.1 * (1 + rank)}),
    "tensor": one(torch.optim.AdamW, lambda rank: {"lr": torch.tensor(0.5 * (1 + rank))}),
    "betas": one(torch.optim.AdamW, lambda rank: {"betas": (0.9, 0.99 if rank else 0.95)}),
    "same": one(torch.optim.AdamW, lambda rank: {"lr": 0.1, "foreach": rank == 0}),
    "same numbers": one(torch.optim.SGD, lambda rank: {"lr": 1 if rank else torch.tensor(1.0)}),
    "order of optimizers": two_in_an_order,
    "order of groups": in_groups,
}


REPORTED = [
    ("lr", "SGD has different options on ranks: lr of param group 0 is 0.1 on rank 0 and 0.2 on rank 1"),
    ("tensor", "lr of param group 0 is 0.5 on rank 0 and 1 on rank 1"),
    ("betas", "betas of param group 0 is (0.9, 0.95) on rank 0 and (0.9, 0.99) on rank 1"),
    ("order of groups", "param group 0 has other parameters on rank 0 than on rank 1, or in another order"),
    ("in a backward", "lr of param group 0 is 0.1 on rank 0 and 1.1 on rank 1"),
]


@pytest.mark.parametrize(("front", "case"), spread(FRONTS, REPORTED))
def test_other_options_of_a_rank_are_reported_once(pool2: Run, front: str, case: tuple[str, str]) -> None:
    name, reported = case
    texts = [text for texts in pool2(stepped, front, name) for text in texts if "different options" in text]
    assert len(texts) == 1 and reported in texts[0], texts


def test_two_ranks_of_three_with_other_options_are_one_warning(pool3: Run) -> None:
    texts = [text for texts in pool3(stepped, "original", "lr") for text in texts]
    assert len(texts) == 1 and "lr of param group 0 is 0." in texts[0], texts


@pytest.mark.parametrize("front", FRONTS)
def test_same_options_are_no_warning(pool2: Run, front: str) -> None:
    for case in ("same", "same numbers", "order of optimizers"):
        assert pool2(stepped, front, case) == [[], []], case


def test_differences_in_words() -> None:
    assert differences([("a", {"lr": "1"})], [("a", {"lr": "1"})], rank=1, other=0) == []
    assert differences([("a", {})], [], rank=1, other=0) == ["it has 0 param groups on rank 0 and 1 on rank 1"]
    assert differences([("a", {"lr": "1"})], [("a", {})], rank=1, other=0) == [
        "lr of param group 0 is not set on rank 0 and 1 on rank 1"
    ]
