"""Forwards inside summon_full_params(), as programs generate text: whole parameters are computed with as they are."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, stats
from flatfsdp.errors import UsageError
from tests.conftest import Run

pytestmark = pytest.mark.distributed

WIDTH = 6


class Generator(nn.Module):
    """Parameters of its own around units, one of them tied, and a method that calls the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x @ self.embedding))

    def generate(self, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = self(x).tanh()
        return x


def wrapped(orig: bool, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(Generator(), auto_wrap_policy={nn.Linear}, use_orig_params=orig, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, generated: Tensor) -> float:
    loss = (model(x) - generated).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def one_process() -> list[float]:
    model = Generator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for _ in range(3):
        x = torch.ones(2, WIDTH)
        with torch.no_grad():
            generated = model.generate(x, 2)
        found.append(step(model, optimizer, x, generated))
    return found


def generate_and_train(rank: int, world: int, orig: bool, recurse: bool, by: str) -> list[float]:
    model = wrapped(orig)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for _ in range(3):  # the first time before any forward
        x = torch.ones(2, WIDTH)
        with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model, writeback=False, recurse=recurse):
            generated = model.generate(x, 2) if by == "method" else model(model(x).tanh()).tanh()
            assert model.module.embedding.shape == (WIDTH, WIDTH)
        found.append(step(model, optimizer, x, generated))
    return found


@pytest.mark.parametrize("by", ["method", "wrapper"])
@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("orig", [True, False])
def test_generation_between_steps(pool2: Run, orig: bool, recurse: bool, by: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in pool2(generate_and_train, orig, recurse, by):
            assert found == pytest.approx(one_process(), rel=1e-5)


def each_at_its_own_pace(rank: int, world: int) -> tuple[bool, bool]:
    model = wrapped(True)
    with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model, writeback=False):
        figures = stats(model)
        figures.reset()
        found = model.generate(torch.ones(2, WIDTH), 1 + rank)
        silent = not figures.comm
        expected = Generator().generate(torch.ones(2, WIDTH), 1 + rank)
    return silent, torch.allclose(found, expected)


def test_ranks_generate_as_much_as_they_like_where_all_is_summoned(pool2: Run) -> None:
    assert pool2(each_at_its_own_pace) == [(True, True)] * 2


def what_is_refused(rank: int, world: int) -> list[str]:
    model = wrapped(True)
    x, words = torch.ones(2, WIDTH), []
    with FullyShardedDataParallel.summon_full_params(model):
        try:
            model(x)
        except UsageError as error:
            words.append(str(error))
    with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=True):
        try:
            torch.testing.assert_close(model(x), Generator()(x))
        except UsageError as error:
            words.append(str(error))
    return words


def test_gradients_and_absent_parameters_are_refused(pool2: Run) -> None:
    first, second = pool2(what_is_refused)
    assert len(first) == 1 and len(second) == 2
    assert "Without gradients (torch.no_grad()) it may run there" in first[0] and first[0] == second[0]
    assert "gives this rank no whole parameters" in second[1]
