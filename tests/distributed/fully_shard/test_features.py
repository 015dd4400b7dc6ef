"""What the wrapper has besides works on modules of fully_shard, and gives the numbers of the plain program."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatfsdp
from tests.conftest import Run
from tests.distributed.fully_shard.test_beside_torchs import WORDS, Case, Net, differences, sharded
from tests.harness.meshes import named_mesh


def batches(rank: int, count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(17 + rank)
    return list(torch.randint(0, WORDS, (count, 3, 4), generator=generator))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def plainly(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches(rank):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def joined(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with flatfsdp.join(model) as joins:
        for batch in joins(batches(rank)):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def looked_at(model: nn.Module, rank: int) -> None:
    assert "norm, head" in str(flatfsdp.summary(model)) and flatfsdp.stats(model)
    model.keep_frozen_unsharded()  # type: ignore[operator]
    with flatfsdp.inference(model):
        model(batches(rank)[0])
    with flatfsdp.detect_nonfinite(model):
        plainly(model, rank)
    flatfsdp.check_replicas(model)


def fused(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    flatfsdp.fuse_optimizer_steps(optimizer)
    for batch in batches(rank):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def in_backward(model: nn.Module, rank: int) -> None:
    flatfsdp.optimizer_in_backward(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for batch in batches(rank):
        loss_of(model, batch).backward()


def gathered_ahead(model: Any, rank: int) -> None:
    one, two = model.blocks[:2]
    one.set_modules_to_forward_prefetch([two, model.norm])
    two.set_modules_to_backward_prefetch([one])
    handle = one.unshard(async_op=True)
    handle.wait()
    assert not hasattr(one.up.weight, "placements")
    one.reshard()
    assert hasattr(one.up.weight, "placements")
    plainly(model, rank)


PROGRAMS = {each.__name__: each for each in (joined, looked_at, fused, in_backward, gathered_ahead)}


def feature(rank: int, world: int, program: Callable[[nn.Module, int], None]) -> list[str]:
    torch.manual_seed(0)
    model = Net()
    one, two = (sharded(copy.deepcopy(model), flatfsdp, named_mesh(2), Case()) for _ in range(2))
    plainly(one, rank)
    program(two, rank)
    return differences(one, two)


@pytest.mark.parametrize("name", PROGRAMS)
def test_features(name: str, pool2: Run) -> None:
    assert pool2(feature, PROGRAMS[name]) == [[], []]
