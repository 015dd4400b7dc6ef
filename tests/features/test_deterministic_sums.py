"""Sums of gradients with `deterministic_sums=True`: the same bits on any number of ranks, and errors for the rest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.errors import AgreementError, ConfigTypeError, ConfigValueError, UsageError
from tests.conftest import Run
from tests.harness.meshes import shared_mesh

pytestmark = pytest.mark.distributed

Owners = Callable[[int, int], list[int]]  # from the number of microbatches and of ranks, the rank of each


def aligned(count: int, world: int) -> list[int]:
    return [index * world // count for index in range(count)]


def in_turns(count: int, world: int) -> list[int]:
    return [index % world for index in range(count)]


def unevenly(count: int, world: int) -> list[int]:
    return [max(0, index - count + world) for index in range(count)]


class Net(nn.Module):
    """Layers of odd sizes, one that is used twice, one that only some microbatches use, and a frozen one."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 13)) for _ in range(2))
        self.rare = nn.Linear(13, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.head = nn.Linear(13, 5)
        self.recomputed = recomputed

    def forward(self, x: Tensor, rarely: bool) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x))
        if rarely:
            x = x + self.rare(x)
        return self.head(self.frozen(x))


def wrapped(net: nn.Module, mesh: tuple[int, int] | None = None, **options: Any) -> FullyShardedDataParallel:
    if mesh is not None:
        options["device_mesh"] = shared_mesh(*mesh)
    options = {"use_orig_params": True, "auto_wrap_policy": {nn.Sequential}, "deterministic_sums": True} | options
    return FullyShardedDataParallel(net, **options)


def sharded(net: Net, **options: Any) -> Net:
    for block in net.blocks:
        flatfsdp.fully_shard(block, deterministic_sums=True, **options)
    return flatfsdp.fully_shard(net, deterministic_sums=True, **options)


def batch(step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(4, 7, generator=generator) * 10.0 ** (index % 5 - 2)


def rounds(owners: list[int], rank: int) -> Iterator[tuple[int | None, bool]]:
    """The microbatches of this rank, with stand-ins up to the number of the others, and whether each is the last."""
    own: list[int | None] = [index for index, owner in enumerate(owners) if owner == rank]
    most = max(map(owners.count, owners))
    for number, index in enumerate(own + [None] * (most - len(own)), 1):
        yield index, number == most


def unsynchronized(model: Any, last: bool) -> AbstractContextManager[Any]:
    if isinstance(model, FullyShardedDataParallel):
        return nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return nullcontext()


def clip(model: Any, most: float) -> Tensor:
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(most)
    norm = model.clip_grad_norm_(most)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def digest(model: Any, optimizer: torch.optim.Optimizer) -> str:
    """A hash of all parameters and of all optimizer states, in whole."""
    found: dict[str, Any] = {}
    if isinstance(model, FullyShardedDataParallel):
        found |= model.state_dict()
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        found |= {f"{name}.{key}": value for name, each in states.items() for key, value in each.items()}
    else:
        for name, parameter in model.named_parameters():
            found[name] = parameter
            found |= {f"{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    made = hashlib.sha256()
    for name, value in sorted(found.items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        made.update(name.encode() + whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def train(
    rank: int,
    world: int,
    wrap: Callable[..., Any],
    count: int,
    owners: Owners,
    accumulates: bool,
    clips: bool = False,
    recomputed: bool = False,
    steps: int = 3,
) -> str:
    torch.manual_seed(0)
    model = wrap(Net(recomputed))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    for step in range(steps):
        for index, last in rounds(owners(count, world), rank):
            with unsynchronized(model, last or not accumulates), flatfsdp.microbatch(index, of=count):
                x = batch(step, index or 0)
                model(x, rarely=index is not None and index % 4 == 1).square().mean().backward()
        if clips:
            norm = clip(model, 0.5)
            assert norm.isfinite()
        optimizer.step()
        optimizer.zero_grad()
    return digest(model, optimizer)


def on_one(run: Run, *args: Any, **kwargs: Any) -> str:
    """The hash of one rank, which runs all microbatches."""
    (found,) = run(1, train, *args, **kwargs)
    return found


WRAPS = {
    "originals": wrapped,
    "flat": partial(wrapped, use_orig_params=False),
    "rows": partial(wrapped, layout="rows"),
    "SHARD_GRAD_OP": partial(wrapped, sharding_strategy="SHARD_GRAD_OP"),
    "NO_SHARD": partial(wrapped, sharding_strategy="NO_SHARD"),
    "large units": partial(wrapped, join_units_below=0),
    "fully_shard": sharded,
}


@pytest.mark.parametrize("accumulates", [True, False], ids=["no_sync", "reduced each time"])
@pytest.mark.parametrize("name", WRAPS)
def test_one_hash(run: Run, name: str, accumulates: bool) -> None:
    owners = in_turns if accumulates else unevenly
    expected = on_one(run, WRAPS[name], 7, owners, True, clips=True)
    assert {*run(2, train, WRAPS[name], 7, owners, accumulates, clips=True)} == {expected}
    assert {*run(3, train, WRAPS[name], 7, aligned, accumulates, clips=True)} == {expected}
