"""Modules of fully_shard are copied and pickled, with optimizers that follow, and train on as the original would."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatfsdp
from tests.conftest import Run
from tests.fully_shard.test_beside_torchs import WORDS, Case, Net, differences, sharded
from tests.harness.meshes import adamw, named_mesh

pytestmark = pytest.mark.distributed


class WithMethod(Net):
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.hidden(x)))


def step(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor, method: str | None = None) -> torch.Tensor:
    output = model(batch) if method is None else getattr(model, method)(batch)
    loss = F.cross_entropy(output.flatten(0, 1), batch.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # type: ignore[no-any-return]


def copies(rank: int, world: int, how: str, shape: tuple[int, ...]) -> list[str]:
    torch.manual_seed(0)
    model: Any = sharded(WithMethod(), flatfsdp, named_mesh(*shape), Case())
    flatfsdp.register_fsdp_forward_method(model, "logits")
    batches = torch.randint(0, WORDS, (6, 3, 4), generator=torch.Generator().manual_seed(rank))
    optimizer = adamw(model.parameters())
    step(model, optimizer, batches[0])
    if how == "copy":
        twin, its = copy.deepcopy((model, optimizer))
    else:
        twin = pickle.loads(pickle.dumps(model)) if how == "pickle" else saved(model)
        its = adamw(twin.parameters())
        its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    found = differences(model, twin)
    if type(twin) is not type(model) or type(twin.blocks[0]) is not type(model.blocks[0]):
        found.append("classes")
    for batch, method in zip(batches[1:], (None, "logits", None), strict=False):
        one, two = step(model, optimizer, batch, method), step(twin, its, batch, method)
        if not torch.equal(one, two):
            found.append(f"{one} and {two}")
    found += differences(model, twin)
    step(twin, its, batches[5])
    if not differences(model, twin):
        found.append("memory is shared")
    return found


@pytest.mark.parametrize("how", ["copy", "pickle", "saved"])
def test_copies_train_on(how: str, pool2: Run) -> None:
    assert not [each for found in pool2(copies, how, (2,)) for each in found]


def test_hybrids_are_pickled(pool4: Run) -> None:
    assert not [each for found in pool4(copies, "pickle", (2, 2)) for each in found]


class Recurrent(nn.Module):
    """One unit that is a recurrent module, which also has its weights in a list, and one with such a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.LSTM(4, 4), nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.outer(x)[0])[0]  # type: ignore[no-any-return]


def recurrent(rank: int, world: int, how: str) -> list[str]:
    torch.manual_seed(0)
    model: Any = Recurrent()
    mesh = named_mesh(world)
    flatfsdp.fully_shard(model.outer, mesh=mesh)
    flatfsdp.fully_shard(model, mesh=mesh)
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(rank))

    def trained(each: Any) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            losses.append(each(x).square().sum())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.detach() for loss in losses]

    trained(model)
    twin = copy.deepcopy(model) if how == "copy" else pickle.loads(pickle.dumps(model))
    one, two = trained(model), trained(twin)
    return [f"{one} and {two}"] if not all(map(torch.equal, one, two)) else differences(model, twin)


@pytest.mark.parametrize("how", ["copy", "pickle"])
def test_recurrent_modules(how: str, pool2: Run) -> None:
    assert not [each for found in pool2(recurrent, how) for each in found]
