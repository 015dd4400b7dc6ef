"""Random models of which ranks use different parts: units that are nested, frozen, recomputed, passed through or cut
off, against the same models in one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import FullyShardedDataParallel
from tests.conftest import Run

WIDTH = 6
STEPS = 3


def _weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)


class Leafy(nn.Module):
    """Uses those of its parameters that it is told to; none of them: returns what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = _weight(), _weight(), _weight()

    def forward(self, x: Tensor, use: str) -> Tensor:
        for name in use:
            x = x + (x @ getattr(self, name)).tanh() * 0.5
        return x


class Nest(nn.Module):
    """A unit around another one; without `a` and `b` it returns what that returns."""

    def __init__(self, recompute: bool | None) -> None:
        super().__init__()
        self.a, self.b, self.inner = _weight(), _weight(), Leafy()
        self.recompute = recompute

    def forward(self, x: Tensor, use: str) -> Tensor:
        if "a" in use:
            x = x + (x @ self.a).tanh()
        x = _run(self.inner, x, use, self.recompute)
        return x + (x @ self.b).tanh() if "b" in use else x


def _run(module: Callable[[Tensor, str], Tensor], x: Tensor, use: str, recompute: bool | None) -> Tensor:
    """`recompute`: in the backward, reentrantly or not; None for not at all."""
    return module(x, use) if recompute is None else checkpoint(partial(module, use=use), x, use_reentrant=recompute)


class Part(NamedTuple):
    nested: bool
    recompute: bool | None
    trained: bool


class Net(nn.Module):
    """A residual chain of units, drawn by `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        drawn = random.Random(seed)
        torch.manual_seed(seed)
        ways = (None, True, False)
        self.parts = [
            Part(drawn.random() < 0.5, drawn.choice(ways), drawn.random() > 0.15) for _ in range(drawn.randint(2, 5))
        ]
        self.units = nn.ModuleList(Nest(part.recompute) if part.nested else Leafy() for part in self.parts)
        for unit, part in zip(self.units, self.parts, strict=True):
            unit.requires_grad_(part.trained)

    def forward(self, x: Tensor, seed: int) -> Tensor:
        """What is used is drawn by another `seed`."""
        drawn = random.Random(seed)
        x = x.clone().requires_grad_() * 1.0
        for unit, part in zip(self.units, self.parts, strict=True):
            use = "".join(name for name in "abc" if drawn.random() < 0.7)
            cut = drawn.random() < 0.25 and part.recompute is None
            y = _run(unit, x, use, None if part.nested else part.recompute)
            x = x + (y.detach() if cut else y) * 0.5
        return x


def _train(rank: int, world: int, seed: int, prefetch: str, join_units_below: int) -> bool:
    model = FullyShardedDataParallel(
        Net(seed),
        auto_wrap_policy={Leafy, Nest},
        use_orig_params=True,
        backward_prefetch=prefetch,
        join_units_below=join_units_below,
    )
    nets = [Net(seed) for _ in range(world)]

    def run(net: nn.Module, of: int, step: int) -> None:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(of))
        loss: Tensor = net(x, 100 * seed + 10 * step + of).sum()
        loss.backward()

    for step in range(STEPS):
        run(model, rank, step)
        for of, net in enumerate(nets):
            run(net, of, step)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        grads = [[torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()] for net in nets]
        means = [torch.stack(each).mean(0) for each in zip(*grads, strict=True)]
        return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, means, strict=True))


# Each of them has waited for ever, ended the process or given wrong gradients in an earlier version.
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_MID"])
@pytest.mark.parametrize("seed", [0, 17, 26, 31, 36, 39, 48, 51, 117, 132, 158, 163])
def test_what_ranks_do_not_use_is_no_gradient_on_them(pool3: Run, seed: int, prefetch: str) -> None:
    for join_units_below in 0, 2000:
        assert all(pool3(_train, seed, prefetch, join_units_below, timeout=60))
