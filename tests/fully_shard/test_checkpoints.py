"""torch's state-dict functions and its distributed checkpoints on modules of `fully_shard`, against torch's own."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatfsdp.checkpoint
from tests.conftest import Run
from tests.harness.meshes import adamw, named_mesh
from tests.harness.tensor_parallel import mesh_of

pytestmark = pytest.mark.distributed

FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3, bias=False))


def sharded(api: Any, model: nn.Sequential) -> nn.Sequential:
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    return model


def trained(api: Any, rank: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = sharded(api, net(0))
    optimizer = adamw(model.parameters(), 0.1)
    for step in range(2):
        model(torch.ones(2, 4) + rank + step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def values(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    found: list[Any] = list(model.parameters())
    if optimizer is not None:
        found += [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
    return [each.full_tensor().detach() for each in found]


def equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(map(torch.equal, one, two))


def from_rank0(rank: int, world: int) -> list[bool]:
    """Whole values of rank 0 into a model on the meta device, and into one that is there, optimizer included."""
    warnings.simplefilter("ignore")
    whole = net(3).state_dict()
    with torch.device("meta"):
        empty = net(0)
    model = sharded(flatfsdp, empty)
    set_model_state_dict(model, {k: v.clone() for k, v in whole.items()} if rank == 0 else {}, options=FROM_RANK0)
    found = [equal(values(model), list(whole.values()))]
    model, optimizer = trained(flatfsdp, rank)
    of_model = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    of_optimizer = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    other = sharded(flatfsdp, net(1))
    others = adamw(other.parameters(), 0.1)
    set_model_state_dict(other, dict(of_model) if rank == 0 else {}, options=FROM_RANK0)
    set_optimizer_state_dict(other, others, of_optimizer if rank == 0 else {}, options=FROM_RANK0)
    return [*found, equal(values(model, optimizer), values(other, others))]


def test_whole_values_of_rank_0(pool2: Run) -> None:
    assert pool2(from_rank0, timeout=60) == [[True, True]] * 2


def with_others(device: str) -> Any:
    """A model on that device, with tensors of no unit: an ignored parameter of two names, and a buffer, on the CPU;
    and one of each on `device`."""
    with torch.device(device):
        model: Any = net(3)
        model.shift = nn.Parameter(torch.full((2,), 1.0), requires_grad=False)
        model.register_buffer("mean", torch.full((3,), 2.0))
    model.scale = model[0].scale = nn.Parameter(torch.zeros(2))
    model.register_buffer("seen", torch.zeros(()))
    flatfsdp.fully_shard(model, ignored_params={model.scale, model.shift})
    return model


def into_meta(rank: int, world: int, folder: str) -> list[bool]:
    """Loading into a model on the meta device keeps real parameters in place, where optimizers hold them."""
    saved, loaded = with_others("cpu"), with_others("meta")
    with torch.no_grad():
        for tensor in (saved.scale, saved.seen):
            tensor.fill_(5.0)
    flatfsdp.checkpoint.save(folder, model=saved)
    held = [loaded.scale, loaded.seen]
    flatfsdp.checkpoint.load(folder, model=loaded)
    own, others = saved.state_dict(), loaded.state_dict()
    return [
        loaded.scale is loaded[0].scale is held[0] and loaded.seen is held[1],
        not loaded.shift.requires_grad and isinstance(loaded.shift, nn.Parameter),
        own.keys() == others.keys() and all(torch.equal(whole(own[name]), whole(others[name])) for name in own),
        torch.equal(saved(torch.ones(2, 4)), loaded(torch.ones(2, 4))),
    ]


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def test_a_checkpoint_into_a_model_on_the_meta_device(pool2: Run, tmp_path: Path) -> None:
    assert pool2(into_meta, str(tmp_path)) == [[True] * 4] * 2


def copied(rank: int, world: int) -> list[bool]:
    """State dicts are copied and written by torch.save, of DTensors with their own memory alone. One rank may make one
    alone."""
    model, optimizer = trained(flatfsdp, rank)
    figures = flatfsdp.stats(model)
    figures.reset()
    alone = [*model.state_dict().values()] if rank else []
    silent = not figures.comm and all(map(torch.equal, _locals(alone), _locals(model.parameters())))
    buffer = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), buffer)
    buffer.seek(0)
    written, of_optimizer = torch.load(buffer, weights_only=False)
    found = []
    for state in (copy.deepcopy(model.state_dict()), written):
        found.append(equal([each.full_tensor() for each in state.values()], values(model)))
    other = sharded(flatfsdp, net(1))
    others = adamw(other.parameters(), 0.1)
    other.load_state_dict(written)
    others.load_state_dict(of_optimizer)
    storages = [each.to_local().untyped_storage().nbytes() == each.to_local().nbytes for each in other.parameters()]
    weights = [each.redistribute(placements=[Replicate()]).to_local() for each in model.parameters()]
    found += [silent, equal(weights, values(model))]
    return [*found, equal(values(model, optimizer), values(other, others)), all(storages)]


def _locals(parameters: Iterable[Any]) -> list[torch.Tensor]:
    return [each.to_local() for each in parameters]


def test_state_dicts_are_copied_and_written(pool2: Run) -> None:
    assert pool2(copied) == [[True] * 6] * 2


def between(rank: int, world: int, folder: str, ours_first: bool) -> bool:
    warnings.simplefilter("ignore")
    saves, loads = (flatfsdp, theirs) if ours_first else (theirs, flatfsdp)
    model, optimizer = trained(saves, rank)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    other, others = trained(loads, 5 + rank)
    found = dict(zip(("model", "optimizer"), get_state_dict(other, others), strict=True))
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(other, others, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return equal(values(model, optimizer), values(other, others))


@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoints_between_ours_and_torchs(ours_first: bool, pool2: Run, tmp_path: Path) -> None:
    assert pool2(between, str(tmp_path), ours_first, timeout=60) == [True, True]


# -- from one kind of program to another -------------------------------------------------------------------------------


def of_kind(kind: str, steps: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A trained model of four ranks, over all of them or two and two, or of each process alone."""
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3, bias=False))
    mesh = named_mesh(4)
    if "TP" in kind:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, mesh_of(2, 2)["tp"], plan)
        mesh = mesh_of(2, 2)["dp"]
    if kind != "one process":
        api: Any = theirs if "torch" in kind else flatfsdp
        for layer in (*model, model):
            api.fully_shard(layer, mesh=mesh)
    optimizer = adamw(model.parameters(), 0.1)
    for step in range(steps):
        model(torch.ones(2, 4) + step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    names = ("exp_avg", "exp_avg_sq", "step")
    found: list[Any] = [*model.parameters(), *(optimizer.state[p][n] for p in model.parameters() for n in names)]
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach() for each in found]


KINDS = ("ours", "ours with TP", "torch", "torch with TP", "one process")


def among_kinds(rank: int, world: int, folder: str) -> list[str]:
    warnings.simplefilter("ignore")
    found = []
    for saves in KINDS:
        model, optimizer = of_kind(saves, 2)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        where = f"{folder}/{saves.replace(' ', '_')}"
        dcp.save(state, checkpoint_id=where)
        expected = whole_state(model, optimizer)
        for loads in KINDS:
            if "ours" in saves + loads:
                other, others = of_kind(loads, 1)
                state = dict(zip(("model", "optimizer"), get_state_dict(other, others), strict=True))
                dcp.load(state, checkpoint_id=where)
                set_state_dict(other, others, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
                if not equal(whole_state(other, others), expected):
                    found.append(f"{saves} to {loads}")
    return found


def test_checkpoints_from_any_kind_of_program_to_any(pool4: Run, tmp_path: Path) -> None:
    assert pool4(among_kinds, str(tmp_path), timeout=90) == [[]] * 4
