"""Two models around one sharded backbone, as an actor and a critic: whichever of the three is called first, and however
steps alternate, they train like one process. [Note: several roots]"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, fully_shard
from flatfsdp.errors import AgreementError
from tests.conftest import Run
from tests.harness.gradients import plain
from tests.harness.played_fronts import whole
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed

WIDTH = 4
FRONTS = ["wrapper", "flat", "fully_shard"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.linear(x).tanh()
        return y


class Top(nn.Module):
    def __init__(self, backbone: nn.Module, width: int, blocks: int) -> None:
        super().__init__()
        self.own = nn.Sequential(*(Block() for _ in range(blocks)))
        self.backbone, self.head = backbone, nn.Linear(WIDTH, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.backbone(self.own(x)))
        return y


Three = tuple[nn.Module, nn.Module, nn.Module]


def build(front: str = "", *, first: bool = False) -> Three:
    """(actor, critic, backbone); of other numbers of units. `first`: the backbone gets the inputs, which need no
    gradients: its part of a backward has no end that a hook could see."""
    torch.manual_seed(0)
    backbone: nn.Module = nn.Sequential(Block(), Block())
    actor, critic = (Top(backbone, 3, 0), Top(backbone, 1, 0)) if first else (Top(backbone, 3, 1), Top(backbone, 1, 2))
    if front == "fully_shard":
        for module in (*backbone, backbone, *actor.own, actor, *critic.own, critic):
            fully_shard(module)
        return actor, critic, backbone
    if not front:
        return actor, critic, backbone

    def wrap(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, auto_wrap_policy={Block}, use_orig_params=front == "wrapper")

    actor.backbone = critic.backbone = backbone = wrap(backbone)
    return wrap(actor), wrap(critic), backbone


def losses(models: Three, name: str, x: Tensor) -> Iterator[Tensor]:
    """The losses of one step, each of which goes backward before the next."""
    actor, critic, backbone = models
    if name == "actor":
        yield actor(x).log_softmax(-1)[:, 0].mean()
    elif name == "critic":
        yield critic(x).square().mean()
    elif name == "backbone":
        yield backbone(x).square().mean()
    elif name == "together":
        yield critic(x).square().mean() + actor(x).sin().mean()
    elif name == "crossed":
        first, second = actor(x), critic(x)
        yield second.square().mean()
        yield first.sin().mean()
    elif name == "evaluated":
        value = critic(x)
        with torch.no_grad():
            y = actor(x)
        yield (value * (1 - y[:, :1])).mean()
    else:  # "between"
        y = actor(x)
        with torch.no_grad():
            value = critic(x)
        yield (y.log_softmax(-1)[:, :1] * (1 - value)).mean()
        yield critic(x).square().mean()


def parameters(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    return list({id(p): p for model in models for p in model.parameters()}.values())


def state(model: nn.Module, front: str) -> dict[str, Tensor]:
    """Collective."""
    return {plain(name): whole(value) for name, value in model.state_dict().items()}


def train(rank: int, world: int, front: str, order: Sequence[str], first: bool = False) -> None:
    alone, models = build(first=first), build(front, first=first)
    optimizers = [torch.optim.AdamW(parameters(each), lr=0.01, eps=0.01) for each in (alone, models)]
    generator = torch.Generator().manual_seed(1)
    for name in [*order, "between", "together", *reversed(order), "between"]:
        batch = torch.randn(2 * world, WIDTH, generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for mine in batch.chunk(world):
            for loss in losses(alone, name, mine):
                (loss / world).backward()
        for loss in losses(models, name, batch.chunk(world)[rank]):
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    for model, one in zip(models, alone, strict=True):
        saved = state(model, front)
        assert saved.keys() == one.state_dict().keys()
        for name, value in one.state_dict().items():
            torch.testing.assert_close(saved[name], value, msg=f"{order}: {name} differs")
        model.load_state_dict(model.state_dict())
    x = torch.ones(2, WIDTH)
    for model, one in zip(models, alone, strict=True):
        torch.testing.assert_close(model(x), one(x))


ORDERS = [
    *permutations(["actor", "critic", "backbone"]),
    ("between", "backbone"),
    ("together",),
    ("backbone", "between"),
]


def under_some_fronts(orders: Sequence[Sequence[str]]) -> list[Any]:
    """Each order under one or two of the fronts, each front with half of the orders; with --thorough, all."""
    return [
        pytest.param(front, order, id=f"{front}-{'-'.join(order)}")
        for row, front in enumerate(FRONTS)
        for order in some(orders, 2, row)
    ]


@pytest.mark.parametrize(("front", "order"), under_some_fronts(ORDERS))
def test_any_order_of_first_calls_trains_like_one_process(run: Run, front: str, order: Sequence[str]) -> None:
    run(2, train, front, order)


@pytest.mark.parametrize(
    ("front", "order"),
    under_some_fronts([("together",), ("crossed",), ("evaluated", "crossed"), ("actor", "critic", "together")]),
)
def test_a_backbone_that_gets_the_inputs(run: Run, front: str, order: Sequence[str]) -> None:
    """One model's backward ends before the other's: the backbone's gradients were dropped there."""
    run(2, train, front, order, first=True)


def differ(rank: int, world: int, front: str) -> str:
    actor, critic, _ = build(front)
    try:
        (critic if rank else actor)(torch.ones(2, WIDTH))
    except AgreementError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("front", FRONTS)
def test_ranks_that_call_different_roots_first(run: Run, front: str) -> None:
    for message in run(2, differ, front, timeout=60):
        assert "differ" in message, message
