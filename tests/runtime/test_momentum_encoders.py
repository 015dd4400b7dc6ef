"""Weights that a forward itself updates by those of another unit, element by element: as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed

WIDTH, KEPT = 6, 0.5


def data_set(key: Tensor, query: Tensor) -> None:
    key.data = key.data * KEPT + query.data * (1 - KEPT)


def data_in_place(key: Tensor, query: Tensor) -> None:
    key.data.mul_(KEPT).add_(query.data, alpha=1 - KEPT)


def in_place(key: Tensor, query: Tensor) -> None:
    key.mul_(KEPT)
    key += (1 - KEPT) * query


def lerp(key: Tensor, query: Tensor) -> None:
    key.lerp_(query.detach(), 1 - KEPT)


def one_by_one(update: Callable[[Tensor, Tensor], None]) -> Callable[[nn.Module, nn.Module], None]:
    def of_all(key: nn.Module, query: nn.Module) -> None:
        for ours, theirs in zip(key.parameters(), query.parameters(), strict=True):
            update(ours, theirs)

    return of_all


def together(key: nn.Module, query: nn.Module) -> None:
    torch._foreach_lerp_(list(key.parameters()), list(query.parameters()), 1 - KEPT)


UPDATES = {
    "data=": one_by_one(data_set),
    "data in place": one_by_one(data_in_place),
    "in place": one_by_one(in_place),
    "lerp_": one_by_one(lerp),
    "foreach": together,
}


class Momentum(nn.Module):
    """A trained encoder, and one that follows it; `first`: that one moves before the other runs."""

    def __init__(self, update: Callable[[nn.Module, nn.Module], None], *, first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.update, self.first = update, first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.move()
        query = self.query(x)
        if not self.first:
            self.move()
        with torch.no_grad():
            key = self.key(x)
        return (query - key + 1).square().mean()

    @torch.no_grad()
    def move(self) -> None:
        self.update(self.key, self.query)


def losses(model: nn.Module, rows: slice) -> list[float]:
    """Of some steps, on these rows of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        loss = model(torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "joined": {},
    "one by one": {"join_units_below": 0},
    "ahead": {"join_units_below": 0, "forward_prefetch": True},
    "encoders": {"auto_wrap_policy": {nn.Sequential}},
    "flat": {"use_orig_params": False},
    "flat, ahead": {"use_orig_params": False, "join_units_below": 0, "forward_prefetch": True},
    "kept": {"keep": "device"},
    "kept on the host": {"keep": "host"},
}


def follow(rank: int, world: int, setting: str) -> dict[str, list[float]]:
    options: dict[str, Any] = {"auto_wrap_policy": {nn.Linear}, "use_orig_params": True, **SETTINGS[setting]}
    keep = options.pop("keep", None)
    found = {}
    turn = [*SETTINGS].index(setting)
    for number, name in enumerate(UPDATES if setting == "joined" else ("data=", "foreach")):
        for first in some((False, True), 2, number + turn // 2):
            update = UPDATES[name]
            model = FullyShardedDataParallel(Momentum(update, first=first), **options)
            if keep:
                model.keep_frozen_unsharded(on=keep)
            found[f"{name}, {first}"] = losses(model, slice(2 * rank, 2 * rank + 2))
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_momentum_encoder_moves_inside_a_forward(pool3: Run, setting: str) -> None:
    of_ranks = pool3(follow, setting)
    for name in of_ranks[0]:
        one_process = losses(Momentum(UPDATES["in place"], first=name.endswith("True")), slice(None))
        mean = torch.tensor([found[name] for found in of_ranks]).mean(0)
        torch.testing.assert_close(mean, torch.tensor(one_process), rtol=1e-5, atol=1e-6, msg=f"{setting}: {name}")


def refused(rank: int, world: int) -> list[str]:
    model = FullyShardedDataParallel(Momentum(together), auto_wrap_policy={nn.Linear}, use_orig_params=True)
    weight = model.module.query[0].weight
    output = model(torch.ones(1, WIDTH))
    words = []

    def attempt(use: Callable[[], Any]) -> None:
        try:
            use()
        except UsageError as error:
            words.append(str(error))

    whole = torch.ones(WIDTH, WIDTH)
    with torch.no_grad():
        attempt(lambda: weight.mul_(whole))  # not this rank's shard
        attempt(lambda: torch._foreach_add_([whole], [weight]))
        attempt(lambda: weight.norm())  # not element by element
        attempt(lambda: setattr(weight, "data", whole))
    attempt(lambda: weight * 2)  # of a graph
    attempt(lambda: weight.detach())
    output.backward()
    return words


def test_what_is_not_of_shards_is_refused(pool3: Run) -> None:
    for rank, words in enumerate(pool3(refused)):
        assert len(words) == 6, rank
        assert all("'weight' of unit 'query.0'" in each for each in words)
        assert ("shards cannot be combined with full tensors") in words[
            0
        ] and "shards cannot be combined with full tensors" in words[1]
        assert "expected this rank's shard" in words[3]
