"""Modules that tensor parallelism has split, side by side with torch's `fully_shard`: losses, norms, local shards and
DTensors are equal bit by bit."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import flatfsdp
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness import thorough
from tests.harness.tensor_parallel import Net, mesh_of, parallelized, seeded, step_one, step_ours


def made(package: Any, shape: tuple[int, ...], *, sequence: bool) -> Any:
    """The model under tensor parallelism and one of the two."""
    mesh = mesh_of(*shape)
    net = parallelized(seeded(), mesh["tp"], sequence=sequence)
    dp = mesh["dp"] if mesh.ndim == 2 else mesh["replicate", "dp"]
    for block in net.blocks:
        package.fully_shard(block, mesh=dp)
    package.fully_shard(net, mesh=dp)
    return net


def norm_of(model: nn.Module) -> torch.Tensor:
    """The norm of all gradients, which lie on two meshes."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter.grad)  # type: ignore[arg-type]
    norms: list[Any] = [torch.nn.utils.get_total_norm(grads) for grads in by_mesh.values()]
    return torch.linalg.vector_norm(torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]))


def beside(rank: int, world: int, shape: tuple[int, ...], sequence: bool) -> list[str]:
    steps = 4
    stories: list[tuple[Any, list[Any]]] = []
    for package in (flatfsdp, theirs):
        model = made(package, shape, sequence=sequence)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        seen: list[Any] = []
        for step in range(steps):
            seen.append((step_ours(model, shape, step), norm_of(model).item()))
            optimizer.step()
            optimizer.zero_grad()
        stories.append((model, seen))
    (ours, text), (torchs, expected) = stories
    lines = [f"step {i}: {a}, expected {b}" for i, (a, b) in enumerate(zip(text, expected, strict=True)) if a != b]
    for (name, found), wanted in zip(ours.named_parameters(), torchs.parameters(), strict=True):
        if found._spec != wanted._spec:
            lines.append(f"{name}: {found._spec}, expected {wanted._spec}")
        elif not torch.equal(found.to_local(), wanted.to_local()):
            lines.append(f"{name}: another local shard")
    one = seeded()
    step_one(one, shape, 0)
    return lines


@pytest.mark.parametrize("sequence", [True, False])
def test_two_by_two(pool4: Run, sequence: bool) -> None:
    assert not [line for lines in pool4(beside, (2, 2), sequence) for line in lines]


def between(rank: int, world: int, folder: str) -> list[str]:
    """What one of the two has saved after two steps, optimizer included, the other reads; and goes on alike."""
    shape, found = (2, 2), []
    warnings.simplefilter("ignore")
    for saves, loads in ((flatfsdp, theirs), (theirs, flatfsdp)):
        where = f"{folder}/{saves.__name__}"
        model, optimizer = trained(saves, shape, 2)
        dcp.save(state_of(model, optimizer), checkpoint_id=where)
        other, others = trained(loads, shape, 1)
        state = state_of(other, others)
        dcp.load(state, checkpoint_id=where)
        set_state_dict(other, others, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for step in (2, 3):
            for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
                of_one, of_two = optimizer.state[one], others.state[two]
                pairs = [(one, two), *((of_one[key], of_two[key]) for key in ("exp_avg", "exp_avg_sq", "step"))]
                found += [f"{saves.__name__}, {name}" for pair in pairs if not alike(*pair)]
            losses = [step_ours(each, shape, step) for each in (model, other)]
            for each in (optimizer, others):
                each.step()
                each.zero_grad()
            found += [f"{saves.__name__}: losses {losses}"] * (losses[0] != losses[1])
    return found


def alike(one: Any, two: Any) -> bool:
    if isinstance(one, DTensor) and isinstance(two, DTensor):
        return one._spec == two._spec and torch.equal(one.to_local(), two.to_local())
    return torch.equal(one, two)


def trained(package: Any, shape: tuple[int, ...], steps: int) -> tuple[Any, torch.optim.Optimizer]:
    model = made(package, shape, sequence=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(steps):
        step_ours(model, shape, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def test_checkpoints_between_ours_and_torchs(pool4: Run, tmp_path: Path) -> None:
    assert pool4(between, str(tmp_path), timeout=90) == [[]] * 4


def copied(rank: int, world: int) -> list[str]:
    """Copies train alike, and so does a model from the meta device that is assigned their values. Pickles are
    refused."""
    shape, steps = (2, 2), range(3)
    mesh = mesh_of(*shape)
    model = made(flatfsdp, shape, sequence=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    step_ours(model, shape, 0)
    optimizer.step()
    optimizer.zero_grad()
    twin, its = copy.deepcopy((model, optimizer))
    with torch.device("meta"):
        empty = parallelized(Net(), mesh["tp"], sequence=True)
    for block in empty.blocks:
        flatfsdp.fully_shard(block, mesh=mesh["dp"])
    flatfsdp.fully_shard(empty, mesh=mesh["dp"])
    empty.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    others = torch.optim.AdamW(empty.parameters(), lr=1e-2, foreach=False)
    others.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(UsageError, match=r"with DTensors \(.*\) cannot be pickled"):
        pickle.dumps(model)
    losses = []
    for each, one in ((model, optimizer), (twin, its), (empty, others)):
        losses.append([])
        for step in steps:
            losses[-1].append(step_ours(each, shape, step))
            one.step()
            one.zero_grad()
    return [f"{each}, expected {losses[0]}" for each in losses[1:] if each != losses[0]]


def test_copies(pool4: Run) -> None:
    assert not [line for lines in pool4(copied) for line in lines]


@pytest.mark.skipif(not thorough.is_thorough(), reason="eight ranks; --thorough")
def test_hybrid_two_by_two_by_two(run: Run) -> None:
    assert not [line for lines in run(8, beside, (2, 2, 2), True, timeout=120) for line in lines]
