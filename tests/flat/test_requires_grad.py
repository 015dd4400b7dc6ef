"""`requires_grad` changed between steps, on all ranks; on one only: tests/agreement/test_ranks_that_part.py."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.watchdog.store import StoreClient
from flatfsdp.errors import UsageError
from tests.conftest import Run

pytestmark = pytest.mark.distributed

STEPS = 15


class Game(nn.Module):
    """Two players that are trained in turns."""

    skips_second = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return x if self.skips_second else self.second(x)


def wrapped(strategy: str, use_orig_params: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        Game(), auto_wrap_policy={nn.Linear}, sharding_strategy=strategy, use_orig_params=use_orig_params
    )


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def freeze_in_turn(net: nn.Module, step: int, length: int = 1) -> None:
    seconds = step % (length + 1) == length
    net.first.requires_grad_(not seconds)
    net.second.requires_grad_(seconds)


def in_turns(rank: int, world: int, strategy: str, use_orig_params: bool, length: int) -> tuple[list[int], bool]:
    """Requests to the store of the main thread in each step, and whether parameters are those of one process."""
    model, alone = wrapped(strategy, use_orig_params), Game()
    ours, plain = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, alone))
    requests, reachable, main = [0] * STEPS, StoreClient._reachable, threading.main_thread()

    def counted(stores: StoreClient) -> Any:
        requests[step] += threading.current_thread() is main
        return reachable(stores)

    with patch.object(StoreClient, "_reachable", counted):
        for step in range(STEPS):
            freeze_in_turn(model.module, step, length)
            freeze_in_turn(alone, step, length)
            model(batch(rank, step)).square().mean().backward()
            for of in range(world):
                (alone(batch(of, step)).square().mean() / world).backward()
            for optimizer in ours, plain:
                optimizer.step()
                optimizer.zero_grad()
    found = model.state_dict()
    return requests, all(torch.allclose(found[name], each) for name, each in alone.state_dict().items())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize(("use_orig_params", "length"), [(True, 1), (False, 1), (True, 4)])
def test_players_in_turns_cost_nothing_once_learned(
    pool2: Run, strategy: str, use_orig_params: bool, length: int
) -> None:
    """Nothing is exchanged from the third period on, however long the periods are."""
    for requests, right in pool2(in_turns, strategy, use_orig_params, length):
        assert right
        assert requests[length] and not any(requests[2 * (length + 1) :]), requests


def frozen_inside(rank: int, world: int, strategy: str) -> list[list[bool]]:
    """Which flat parameters get a gradient in three steps: after original parameters of the first one, and then it, are
    frozen; again; after it is trained again."""
    model = wrapped(strategy, use_orig_params=False)
    first, second = model.parameters()
    with FullyShardedDataParallel.summon_full_params(model):
        model.module.first.requires_grad_(False)
    first.requires_grad_(False)
    found = []
    for trained in (False, False, True):
        first.requires_grad_(trained)
        model.zero_grad()
        model(batch(rank, 0)).square().mean().backward()
        found.append([each.grad is not None for each in (first, second)])
    return found


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_flat_parameter_is_frozen_after_its_original_parameters(pool2: Run, strategy: str) -> None:
    assert pool2(frozen_inside, strategy) == [[[False, True], [False, True], [True, True]]] * 2


def frozen_in_a_backward(rank: int, world: int, strategy: str) -> str:
    """A hook freezes an original parameter before the backward reaches its unit; the error of that backward."""
    model = wrapped(strategy, use_orig_params=False)
    for _ in range(2):
        model(batch(rank, 0)).square().mean().backward()
    output = model(batch(rank, 0))
    output.register_hook(lambda grad: (model.module.first.module.weight.requires_grad_(False), None)[1])
    with pytest.raises(UsageError) as error:
        output.square().mean().backward()
    return str(error.value)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_an_original_parameter_of_a_flat_one_is_frozen_in_a_backward(pool2: Run, strategy: str) -> None:
    for error in pool2(frozen_in_a_backward, strategy):
        assert error.startswith("requires_grad of 'weight' was set to False after wrapping. With use_orig_params=False")


def frozen_between(rank: int, world: int, strategy: str, sync: bool) -> str:
    """An original parameter is frozen between a forward and its backward, with synchronization or without; the error of
    that backward."""
    model = wrapped(strategy, use_orig_params=False)
    for _ in range(2):
        model(batch(rank, 0)).square().mean().backward()
    with nullcontext() if sync else model.no_sync():
        if not sync:
            model(batch(rank, 0)).square().mean().backward()  # brings a gradient of each
        loss = model(batch(rank, 0)).square().mean()
        model.module.second.module.weight.requires_grad_(False)
        with pytest.raises(UsageError) as error:
            loss.backward()
    return str(error.value)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_an_original_parameter_of_a_flat_one_is_frozen_before_a_backward(pool2: Run, strategy: str, sync: bool) -> None:
    for error in pool2(frozen_between, strategy, sync):
        assert error.startswith("requires_grad of 'weight' was set to False after wrapping. With use_orig_params=False")


def frozen_alone(rank: int, world: int, strategy: str) -> str:
    """All original parameters are frozen before a forward, whose output would need no gradient; its error."""
    model = wrapped(strategy, use_orig_params=False)
    for each in (model.module.first.module, model.module.second.module):
        each.weight.requires_grad_(False)
        each.bias.requires_grad_(False)
    with pytest.raises(UsageError) as error:
        model(batch(rank, 0))
    return str(error.value)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_all_original_parameters_of_flat_ones_are_frozen_before_a_forward(pool2: Run, strategy: str) -> None:
    for error in pool2(frozen_alone, strategy):
        assert error.startswith("requires_grad of 'weight' was set to False after wrapping. With use_orig_params=False")
