"""Checkpoints around several units, which are recomputed together, and around a unit's own parameters, against one
process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from flatfsdp import FullyShardedDataParallel
from tests.conftest import Run
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed

WIDTH = 6
STEPS = 3

Step = Callable[["Net", Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(self.first(x).tanh())
        return y


class Net(nn.Module):
    """Blocks between parameters of the root, run by one of the functions below."""

    def __init__(self, how: str, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step, self.reentrant = STEPS_OF[how], reentrant
        # Without an embedding the root's gradients have all come before the blocks are recomputed.
        self.embedding = nn.Linear(WIDTH, WIDTH) if how != "the root's last parameter" else None
        self.blocks = nn.Sequential(*(Block() for _ in range(5)))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.embedding is not None else self.blocks[4](x)
        y: Tensor = self.head(self.step(self, x))
        return y

    def recomputed(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        return checkpoint(function, *inputs, use_reentrant=self.reentrant)

    def chain(self, *places: int) -> Callable[[Tensor], Tensor]:
        """Blocks one after the other."""

        def run(x: Tensor) -> Tensor:
            for place in places:
                x = self.blocks[place](x)
            return x

        return run


def _sequence(net: Net, x: Tensor) -> Tensor:
    y: Tensor = checkpoint_sequential(net.blocks, 2, x, use_reentrant=net.reentrant)
    return y


def _nested(net: Net, x: Tensor) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        y: Tensor = net.blocks[3](net.recomputed(net.chain(1, 2), net.blocks[0](x)))
        return y

    y: Tensor = net.blocks[4](net.recomputed(outer, x))
    return y


def _twice(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.recomputed(net.chain(3, 1, 4), net.recomputed(net.chain(0, 1, 0, 2), x))
    return y


def _side_by_side(net: Net, x: Tensor) -> Tensor:
    """One output is used twice, one later, and one not at all."""

    def beside(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(block(x) for block in net.blocks[:4])

    one, two, _, four = net.recomputed(beside, x)
    y: Tensor = net.blocks[4](one + two * one) + four
    return y


def _own_parameters(net: Net, x: Tensor) -> Tensor:
    """A parameter is read in two checkpoints and outside."""
    assert net.embedding is not None
    weight = net.embedding.weight

    def tied(x: Tensor) -> Tensor:
        return (x @ weight).tanh()

    y: Tensor = net.recomputed(tied, net.blocks[0](net.recomputed(tied, net.chain(1, 2)(x))))
    return y


def _roots_last_parameter(net: Net, x: Tensor) -> Tensor:
    def tied(x: Tensor) -> Tensor:
        y: Tensor = net.blocks[0](x) @ net.head.weight
        return net.chain(1, 2)(y.tanh())

    y: Tensor = net.blocks[3](net.recomputed(tied, x))
    return y


STEPS_OF: dict[str, Step] = {
    "a sequence": _sequence,
    "nested": _nested,
    "twice": _twice,
    "side by side": _side_by_side,
    "parameters of the root": _own_parameters,
    "the root's last parameter": _roots_last_parameter,
}


def _train(rank: int, world: int, how: str, reentrant: bool, options: dict[str, Any]) -> list[str]:
    """Parameters that differ from those of one process on all ranks' batches."""
    model = FullyShardedDataParallel(Net(how, reentrant), auto_wrap_policy={Block}, **options)
    alone = Net(how, reentrant)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in (model, alone)]
    for step in range(STEPS):
        of_ranks = [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)]
        model(of_ranks[rank]).square().sum().backward()
        for x in of_ranks:
            (alone(x).square().sum() / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, expected = model.state_dict(), alone.state_dict()
    return [name for name in expected if not torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)]


@pytest.mark.parametrize(
    ("how", "reentrant", "join_units_below"),
    [
        (how, reentrant, below)
        for row, how in enumerate(STEPS_OF)
        for reentrant in (True, False)
        for below in some((0, 2**20), 2, row + reentrant)  # all pairs of the three
    ],
)
def test_several_units_under_one_checkpoint(how: str, reentrant: bool, join_units_below: int, pool2: Run) -> None:
    # Each way to prefetch with each checkpoint, reentrant or not.
    turn = [*STEPS_OF].index(how) + 2 * reentrant + (join_units_below > 0)
    for prefetch in some(("BACKWARD_PRE", "BACKWARD_MID", "BACKWARD_POST", None), 4, turn):
        options = {"backward_prefetch": prefetch, "join_units_below": join_units_below}
        assert pool2(_train, how, reentrant, options) == [[], []]
