"""Small units that share their collectives give the same bits as units with collectives of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import ALL, HALVES, HYBRID, Setting, full_parameters, seeded
from tests.harness.models import WIDTH, Feedforward
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.distributed

BLOCKS = 9
MOST = 2**14


class Many(nn.Module):
    """Small units between larger ones, one of which is called twice and one of which is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Small() for _ in range(BLOCKS))
        self.large = Feedforward(WIDTH, 2**12 // WIDTH)  # more than a group has room for

    def forward(self, x: Tensor, *, order: list[int], detached: int | None) -> Tensor:
        x = x * self.scale
        for place, i in enumerate(order):
            block = self.blocks[i]
            y = checkpoint(block, x, use_reentrant=False) if i == 5 else block(x)
            x = x + (y.detach() if i == detached else y)
            if place == 3:
                x = x + self.large(x)
        return x.square().mean().sqrt()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x) + self.shift)


ORDERS = (list(range(BLOCKS)), list(range(BLOCKS)), [0, 1, 2, 1, 4, 5, 8], [8, 7, 6, 5, 4, 3], list(range(BLOCKS)))


def program(model: Any, rank: int, step: int) -> list[Tensor]:
    """Every other step one rank's backward does not reach one of the units, and another rank's not another."""
    data = torch.Generator().manual_seed(step * 8 + rank)
    losses = []
    for micro in range(1 + step % 2):
        detached = (1 + rank if step % 2 else None) if micro == 0 else None
        loss = model(torch.randn(3, WIDTH, generator=data), order=ORDERS[step], detached=detached)
        loss.backward()
        losses.append(loss.detach())
    return losses


def joined(rank: int, world: int, under: tuple[Setting, ...]) -> list[str]:
    """Values that differ in any bit from those of units with collectives of their own."""
    lines = []
    for setting in under:
        with setting.doubles():
            trained = []
            for most in (0, MOST):
                model = setting.wrap(seeded(Many), (Small, Feedforward), join_units_below=most)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                losses = []
                for step in range(len(ORDERS)):
                    losses += program(model, rank, step)
                    optimizer.step()
                    optimizer.zero_grad()
                trained.append((losses, full_parameters(model)))
        (alone, expected), (together, found) = trained
        if alone != together:
            lines.append(f"{setting}: rank {rank}: losses {together}, expected {alone}")
        lines += [f"{setting}: rank {rank}: {name}" for name in expected if not found[name].equal(expected[name])]
    return lines


def test_joined_units_train_as_if_each_were_alone(pool2: Run) -> None:
    """Of the strategies, ranks of no power of two and replicas have the others."""
    under = (ALL[0], ALL[2], ALL[5]) if is_thorough() else (ALL[2],)
    assert pool2(joined, (*under, Setting("FULL_SHARD", False, offload=True))) == [[], []]


def test_joined_units_of_uneven_shards(pool3: Run) -> None:
    assert pool3(joined, HALVES[1] if is_thorough() else (ALL[1], ALL[4])) == [[], [], []]


def test_joined_units_of_hybrids(pool4: Run) -> None:
    assert pool4(joined, HYBRID[1:3] if is_thorough() else HYBRID[2:3]) == [[]] * 4


def counts(rank: int, world: int) -> list[dict[str, int]]:
    found = []
    for most in (0, MOST):
        model = Setting().wrap(seeded(Many), (Small, Feedforward), join_units_below=most)
        for step in (0, 0):
            inspect.comm_stats(model).reset()
            program(model, rank, step)
        found.append(dict(inspect.comm_stats(model).counts))
    return found


def test_these_models_do_join_units(pool2: Run) -> None:
    units = BLOCKS + 2
    apart, joined = pool2(counts)[0]
    assert apart == {"all_gather": 2 * units - 1, "reduce_scatter": units, "scalar": 1}
    # The large unit parts (root 0 1 2 3) and (4 ... 8), and is in the way of one more group in backward.
    assert joined == {"all_gather": 3 + 3, "reduce_scatter": 3, "scalar": 1}


def another_size(rank: int, world: int) -> None:
    model = Setting().wrap(seeded(Many), (Small,), join_units_below=2**20 - rank)
    program(model, rank, 0)


def test_ranks_must_want_the_same_joined(pool2: Run) -> None:
    with pytest.raises(
        Exception, match=r"the first difference is in join_units_below: rank 0: 1048576; rank 1: 1048575"
    ):
        pool2(another_size)
