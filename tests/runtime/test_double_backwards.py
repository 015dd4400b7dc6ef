"""After `backward(create_graph=True)`, gradients are `.grad` at once, and the graph can be differentiated again."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flatfsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from tests.conftest import Run

pytestmark = pytest.mark.distributed

WIDTH = 4
CAST = MixedPrecision(param_dtype=torch.float64, reduce_dtype=torch.float64)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def sharded(settings: dict[str, Any] | None) -> Any:
    """None: by `fully_shard`."""
    model: Any = net()
    if settings is not None:
        return FullyShardedDataParallel(model, auto_wrap_policy={nn.Linear}, **settings)
    for each in model:
        if isinstance(each, nn.Linear):
            fully_shard(each)
    return fully_shard(model)


def data(of: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * of + step)).requires_grad_()


class Both:
    """A sharded model, and the same one in one process, on the data of all ranks."""

    def __init__(self, rank: int, world: int, settings: dict[str, Any] | None) -> None:
        self.rank, self.world = rank, world
        self.alone, self.model = net(), sharded(settings)
        self.users = [*self.model.parameters()]
        self.wrong: list[str] = []

    def run(self, work: Any) -> None:
        """`work(net, step, rank, weight)`, on ranks, and in one process for each rank."""
        work(self.model, self.rank, 1.0)
        for of in range(self.world):
            work(self.alone, of, 1 / self.world)

    def compare(self, what: str) -> None:
        """Sums of the elements of gradients, and of their squares; of what modules list, too."""
        listed = [*self.model.parameters()]
        if not all(a is b for a, b in zip(listed, self.users, strict=True)):
            self.wrong.append(f"{what}: modules list other parameters")
        found = torch.zeros(2, dtype=torch.float64)
        for each in listed:
            if each.grad is not None:
                grad = each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad
                found += torch.stack([grad.double().sum(), grad.double().square().sum()])
        dist.all_reduce(found)
        grads = torch.cat([torch.zeros(1), *(p.grad.flatten() for p in self.alone.parameters() if p.grad is not None)])
        expected = torch.stack([grads.double().sum(), grads.double().square().sum()]).detach()
        if not torch.allclose(found, expected, rtol=1e-4, atol=1e-6):
            self.wrong.append(f"{what}: {found.tolist()} instead of {expected.tolist()}")

    def zero(self) -> None:
        for each in self.model, self.alone:
            each.zero_grad()


def played(rank: int, world: int, settings: dict[str, Any] | None) -> list[str]:
    warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
    both = Both(rank, world, settings)

    def differentiable(step: int) -> Any:
        def work(model: nn.Module, of: int, weight: float) -> None:
            (model(data(of, step)).square().sum() * weight).backward(create_graph=True)

        return work

    def plain(model: nn.Module, of: int, weight: float) -> None:
        (model(data(of, 9)).sin().sum() * weight).backward()

    def penalized(model: nn.Module, of: int, weight: float) -> None:
        x = data(of, 5)
        (model(x).square().sum() * weight).backward(create_graph=True)
        if model is both.model:
            penalized_after.append(both.users[0].grad is not None)
        assert x.grad is not None
        ((x.grad / weight).square().sum() * weight).backward()

    penalized_after: list[bool] = []
    both.run(differentiable(1))
    both.compare("right after a backward with create_graph")
    both.run(differentiable(2))
    both.compare("after another one")
    both.run(plain)
    both.compare("after a usual one")
    both.run(differentiable(3))
    both.zero()
    both.compare("dropped")
    both.run(plain)
    both.compare("after gradients were dropped")
    both.zero()
    both.run(penalized)
    both.compare("after the backward of a backward")
    both.run(plain)
    both.compare("after a usual one again")
    with torch.no_grad():
        both.model(data(rank, 1))
    if not all(penalized_after):
        both.wrong.append("no gradient before the second backward")
    return both.wrong


@pytest.mark.parametrize(
    "settings",
    [
        {"use_orig_params": True},
        {"use_orig_params": False},
        {"use_orig_params": True, "sharding_strategy": "SHARD_GRAD_OP"},
        {"use_orig_params": True, "mixed_precision": CAST},
        None,
    ],
    ids=str,
)
def test_gradients_are_there_after_a_backward_with_a_graph(settings: dict[str, Any] | None, pool2: Run) -> None:
    assert pool2(played, settings) == [[], []]


def hooked(rank: int, world: int) -> list[int]:
    """The number of calls after each of three backwards."""
    warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
    model: Any = sharded({"use_orig_params": True})
    calls: list[bool] = []
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.shape == p.shape))
    counts = []
    x = data(rank, 1)
    model(x).square().sum().backward(create_graph=True)
    counts.append(len(calls))
    assert x.grad is not None
    x.grad.square().sum().backward()
    counts.append(len(calls))
    model(data(rank, 2)).sum().backward()
    return [*counts, len(calls), all(calls)]


def test_hooks_run_once_in_each_backward(pool2: Run) -> None:
    for once, twice, thrice, sharded_each_time in pool2(hooked):
        assert once and (twice, thrice) == (2 * once, 3 * once) and sharded_each_time
