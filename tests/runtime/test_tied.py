"""Parameters that several units hold, of which some are recomputed, against one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed

WIDTH = 4


class Leaf(nn.Module):
    """Uses those of its parameters that are switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in "ab")

    def forward(self, x: Tensor, use: str) -> Tensor:
        for name in use:
            x = x + (x @ getattr(self, name)).tanh() / 2
        return x


class Net(nn.Module):
    """Runs units in the order of `calls`, each a place and the parts in use, and recomputes those at `recomputed`.

    The last unit holds parameter b of the first.
    """

    def __init__(self, calls: list[str], recomputed: str, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(Leaf() for _ in range(3))
        self.units[2].b = self.units[0].b
        self.calls, self.recomputed, self.reentrant = calls, recomputed, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for place, *use in self.calls:
            call = partial(self.units[int(place)], use="".join(use))
            x = x + (checkpoint(call, x, use_reentrant=self.reentrant) if place in self.recomputed else call(x)) / 2
        return x


WAYS = [*itertools.product((True, False), ("", "synced", "no_sync"))]  # use_orig_params, and how to accumulate


def _train(
    rank: int,
    world: int,
    calls: list[list[str]],
    recomputed: str,
    reentrant: bool,
    strategy: str,
    ways: list[tuple[bool, str]],
) -> list[str]:
    """Differences from one process that runs all ranks' batches; each rank makes calls of its own."""
    wrong = []
    for original, accumulate in ways:
        model, alone = (Net(calls[rank], recomputed, reentrant) for _ in range(2))
        model = FullyShardedDataParallel(
            model, auto_wrap_policy={Leaf}, sharding_strategy=strategy, use_orig_params=original
        )
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, alone)]
        for step in range(3):
            for last in (True,) if not accumulate else (False, True):
                of_ranks = [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step)) for _ in range(world)]
                with model.no_sync() if accumulate == "no_sync" and not last else nullcontext():
                    model(of_ranks[rank].requires_grad_() * 1.0).square().sum().backward()
                for x, alone.calls in zip(of_ranks, calls, strict=True):
                    (alone(x.detach().requires_grad_() * 1.0).square().sum() / world).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found, expected = model.state_dict(), alone.state_dict()
        different = [name for name in expected if not torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)]
        wrong += [f"{name}, use_orig_params={original}, {accumulate}" for name in different]
    return wrong


CALLS = [
    ["0ab", "1ab", "2ab"],
    ["0a", "1ab", "2ab"],
    ["2ab", "1ab", "0ab"],
    ["0ab", "1a", "2b", "1a", "2b"],
    ["0ab", "2b", "2b"],
    ["2b", "1ab"],
    ["2ab", "0b", "2a"],
]


# In which of all ways, goes round; neighbors have different calls.
@pytest.mark.parametrize(
    ("turn", "recomputed", "reentrant"),
    [
        *((0, "02", False), (1, "0", False), (2, "2", False), (3, "012", False), (4, "1", True)),
    ],
)
def test_recomputed_units_that_share_a_parameter(turn: int, recomputed: str, reentrant: bool, pool2: Run) -> None:
    """Only the unit that shares none is recomputed reentrantly."""
    strategies = itertools.cycle(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
    for number, (calls, strategy) in some([*enumerate(zip(CALLS, strategies, strict=False))], 2, turn):
        ways = some(WAYS, 6, number + 2 * turn)
        assert pool2(_train, [calls, calls], recomputed, reentrant, strategy, ways) == [[], []]


DIFFERENT = [
    (["0ab", "1ab", "2ab"], ["0ab", "1ab", "2a"]),
    (["0a", "1ab", "2ab"], ["0ab", "1ab", "2"]),
    (["0ab", "1a", "2b", "2b"], ["0ab", "1a", "2b", "2a"]),
    (["2ab", "1ab", "0a"], ["2a", "1ab", "0ab"]),
]


@pytest.mark.parametrize(("turn", "recomputed"), list(enumerate(["02", "2", "012"])))
def test_where_ranks_use_different_ones(turn: int, recomputed: str, pool2: Run) -> None:
    for number, (calls, strategy) in enumerate(zip(DIFFERENT, itertools.cycle(("FULL_SHARD", "SHARD_GRAD_OP")))):
        ways = some(WAYS, 6, number + 2 * turn)
        assert pool2(_train, list(calls), recomputed, False, strategy, ways) == [[], []]


class Parted(Net):
    """A part of one of two units that share a parameter is recomputed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        unit = self.units[2]
        unit.forward = lambda x, use: checkpoint(lambda x: (x @ unit.a).tanh(), x, use_reentrant=True)


def _refused(rank: int, world: int, made: type[Net], recomputed: str) -> str:
    """The error of a step."""
    net = made(["0ab", "1ab", "2ab"], recomputed, True)
    model = FullyShardedDataParallel(net, auto_wrap_policy={Leaf})
    with pytest.raises(UsageError) as found:
        model(torch.ones(3, WIDTH, requires_grad=True)).sum().backward()
    return str(found.value)


@pytest.mark.parametrize(
    ("made", "recomputed", "expected"),
    [
        (Net, "0", "unit 'units.0', which shares parameters with unit 'units.2', runs under a reentrant checkpoint"),
        (Net, "2", "unit 'units.2', which shares parameters with unit 'units.0', runs under a reentrant checkpoint"),
        (Parted, "", "a part of unit 'units.2', which shares parameters with unit 'units.0', runs under a reentrant"),
    ],
)
def test_a_reentrant_checkpoint_around_one_of_them_is_refused(
    made: type[Net], recomputed: str, expected: str, pool2: Run
) -> None:
    for message in pool2(_refused, made, recomputed):
        assert expected in message and "use_reentrant=False" in message


class Behind(nn.Module):
    """A frozen parameter behind one that it shares: gradients flow through it when its own have come."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.shared = shared
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.own = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.shared) * self.frozen * self.own


class Owns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH * WIDTH).view(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() @ self.weight


class Shares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = Owns()
        self.first = Behind(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x))
        return y


def frozen_behind_a_shared_one(rank: int, world: int) -> list[str]:
    model = FullyShardedDataParallel(Shares(), auto_wrap_policy={Owns, Behind}, join_units_below=0)
    alone = Shares()
    for step in range(2):
        model(torch.full((2, WIDTH), 1.0 + step + rank)).sum().backward()
        for each in range(world):
            (alone(torch.full((2, WIDTH), 1.0 + step + each)).sum() / world).backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        pairs = zip(model.named_parameters(), alone.parameters(), strict=True)
        return [name for (name, p), q in pairs if q.grad is not None and not torch.allclose(p.grad, q.grad)]


def test_a_frozen_parameter_behind_a_shared_one_is_read_after_the_own_gradients(pool2: Run) -> None:
    assert pool2(frozen_behind_a_shared_one) == [[], []]


class Sharer(nn.Module):
    """Uses a parameter of its own, and one of another module where that is switched on."""

    def __init__(self, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) if shared is None else shared

    def forward(self, x: Tensor, use: str, inner: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        x = x if inner is None else inner(x)
        for name in use.split():
            x = x + (x @ getattr(self, name)).tanh() / 2
        return x


class SharesInside(nn.Module):
    """The owner is around the unit that shares its parameter, and its input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = Sharer()
        self.b = Sharer(self.a.shared)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        y: Tensor = self.a(x, "shared own", lambda x: self.b(x, ("own shared", "own")[rank]))
        return y


class SharesInAChain(nn.Module):
    """The last shares a parameter of one before, which shares a parameter of the first; one rank skips the units
    between these."""

    def __init__(self, *used_by_b: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used_by_b = used_by_b
        self.a, self.x, self.y = (Sharer() for _ in range(3))
        self.b = Sharer(self.a.shared)
        self.c = Sharer(self.b.own)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.b(self.x(self.a(x, "shared own"), "own"), self.used_by_b[rank])
        y = self.y(x, "own")
        y = self.c(x + y if rank == 0 else x + y.detach(), "own shared")
        return y


def _train_shared(rank: int, world: int, net: Callable[[], nn.Module]) -> list[str]:
    model, alone = net(), net()
    model = FullyShardedDataParallel(model, auto_wrap_policy={Sharer}, backward_prefetch=None, join_units_below=0)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for step in range(2):
        of_ranks = [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)]
        model(of_ranks[rank], rank).square().sum().backward()
        for each, x in enumerate(of_ranks):
            (alone(x, each).square().sum() / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, expected = model.state_dict(), alone.state_dict()
    return [name for name in expected if not torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)]


@pytest.mark.parametrize(
    "net",
    [
        SharesInside,
        partial(SharesInAChain, "own shared", "own shared"),
        partial(SharesInAChain, "shared", "shared"),  # its own gradient has come when its backward begins
        partial(SharesInAChain, "own shared", "shared"),
    ],
)
def test_owners_are_there_for_units_that_other_ranks_use_otherwise(net: Callable[[], nn.Module], pool2: Run) -> None:
    assert pool2(_train_shared, net) == [[], []]
