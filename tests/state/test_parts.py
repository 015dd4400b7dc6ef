"""State dicts, states of optimizers and checkpoints of models that tensor parallelism has split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

import flatfsdp
from flatfsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
    checkpoint,
)
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.tensor_parallel import mesh_of, parallelized, seeded, sharded, step_one, step_ours
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT


def made(shape: tuple[int, ...], steps: int, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A model with its optimizer after `steps` steps."""
    model = sharded(shape, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        step_ours(model, shape, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All values of the model and its optimizer, whole, by name."""
    with FullyShardedDataParallel.state_dict_type(model, FULL):
        values = dict(model.state_dict())
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    return values | {f"{n}.{s}": torch.as_tensor(v) for n, each in states.items() for s, v in each.items()}


def unlike(found: dict[str, Tensor], expected: dict[str, Tensor], what: str, tolerance: float = 0.0) -> list[str]:
    lines = [] if found.keys() == expected.keys() else [f"{what}: names {sorted(found.keys() ^ expected.keys())}"]
    for name in found.keys() & expected.keys():
        a, b = found[name], expected[name]
        if type(a) is not Tensor or a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=tolerance):
            lines.append(f"{what}: {name}, {type(a).__name__} {tuple(a.shape)}")
    return lines


def whole_values(rank: int, world: int, shape: tuple[int, ...], options: dict[str, Any]) -> list[str]:
    """Whole state dicts are those of one process, and load on all ranks, or from the first."""
    model, optimizer = made(shape, 2, **options)
    one = seeded()
    its = torch.optim.AdamW(one.parameters(), lr=1e-2)
    for step in range(2):
        step_one(one, shape, step)
        its.step()
        its.zero_grad()
    values = full(model, optimizer)
    states = {f"{n}.{s}": v for n, p in one.named_parameters() for s, v in its.state[p].items()}
    lines = unlike(values, dict(one.state_dict()) | states, "one process", 3e-6)
    for rank0_only in (False, True):
        other, another = made(shape, 1, **options)
        configs = (
            FullStateDictConfig(offload_to_cpu=rank0_only, rank0_only=rank0_only),
            FullOptimStateDictConfig(offload_to_cpu=rank0_only, rank0_only=rank0_only),
        )
        with FullyShardedDataParallel.state_dict_type(model, FULL, *configs):
            saved = model.state_dict()
            saved_states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        if rank0_only and rank and (saved or saved_states):
            lines.append("rank0_only: a rank other than the first has values")
        with FullyShardedDataParallel.state_dict_type(other, FULL, *configs):
            other.load_state_dict(saved)
            loaded = FullyShardedDataParallel.optim_state_dict_to_load(other, another, saved_states)
            another.load_state_dict(loaded)
        lines += unlike(full(other, another), values, f"loaded, rank0_only={rank0_only}")
    return lines


@pytest.mark.parametrize("orig", some([True, False], 2))
def test_whole_state_dicts_are_those_of_one_process(pool4: Run, orig: bool) -> None:
    assert not [line for lines in pool4(whole_values, (2, 2), {"use_orig_params": orig}) for line in lines]


def moved(rank: int, world: int, folder: str, options: dict[str, Any]) -> list[str]:
    """Through torch's distributed checkpoint to other numbers of ranks of either kind."""
    lines = []
    model, optimizer = made((2, 2), 2, **options)
    values = full(model, optimizer)
    with FullyShardedDataParallel.state_dict_type(model, SHARDED):
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        dcp.save({"model": model.state_dict(), "optimizer": states}, checkpoint_id=folder)
    for shape in ((1, 4), (4, 1)):
        other = sharded(shape, **options)
        another = torch.optim.AdamW(other.parameters(), lr=1e-2)
        with FullyShardedDataParallel.state_dict_type(other, SHARDED):
            target = {"model": other.state_dict(), "optimizer": None}
            named = FullyShardedDataParallel.optim_state_dict(other, another)
            target["optimizer"] = named["state"]
            dcp.load(target, checkpoint_id=folder)
            other.load_state_dict(target["model"])
            loaded = FullyShardedDataParallel.optim_state_dict_to_load(other, another, named)
            another.load_state_dict(loaded)
        lines += unlike(full(other, another), values, f"{shape}")
    whole = {"model": {name: torch.zeros_like(value) for name, value in seeded().state_dict().items()}}
    dcp.load(whole, checkpoint_id=folder, no_dist=True)
    return lines + unlike(whole["model"], {name: values[name] for name in whole["model"]}, "whole")


@pytest.mark.parametrize("orig", some([True, False], 2, 1))
def test_sharded_state_dicts_are_read_by_any_number_of_ranks(pool4: Run, tmp_path: Path, orig: bool) -> None:
    options = {"use_orig_params": orig}
    assert not [line for lines in pool4(moved, str(tmp_path), options) for line in lines]


def kept(rank: int, world: int, folder: str, options: dict[str, Any], model_format: str) -> list[str]:
    """Through flatfsdp's own checkpoints to other numbers of ranks of either kind."""
    lines = []
    model, optimizer = made((2, 2), 2, **options)
    values = full(model, optimizer)
    checkpoint.save(folder, model=model, optimizer=optimizer, model_format=model_format)
    for shape in ((2, 2), (4, 1) if options["use_orig_params"] else (1, 4)):
        other = sharded(shape, **options)
        another = torch.optim.AdamW(other.parameters(), lr=1e-2)
        checkpoint.load(folder, model=other, optimizer=another)
        lines += unlike(full(other, another), values, f"{shape}")
    one = seeded()
    one.load_state_dict({name: torch.zeros_like(value) for name, value in one.state_dict().items()})
    whole = one.state_dict()
    checkpoint.load(folder, model=whole, strict=False)
    lines += unlike(whole, {name: values[name] for name in whole}, "whole tensors")
    checkpoint.export_safetensors(model, f"{folder}.safetensors")
    other = sharded((1, 4), **options)
    checkpoint.load_safetensors(other, f"{folder}.safetensors")
    with FullyShardedDataParallel.state_dict_type(other, FULL):
        return lines + unlike(other.state_dict(), {name: values[name] for name in whole}, "safetensors")


@pytest.mark.parametrize(("orig", "model_format"), [(True, "flatfsdp"), (False, "safetensors")])
def test_checkpoints_are_read_by_any_number_of_ranks(pool4: Run, tmp_path: Path, orig: bool, model_format: str) -> None:
    options = {"use_orig_params": orig}
    assert not [line for lines in pool4(kept, str(tmp_path / "kept"), options, model_format) for line in lines]


def to_torchs(rank: int, world: int, folder: str) -> list[str]:
    """torch's fully_shard reads checkpoints of the wrapper and of fully_shard saved by torch.distributed.checkpoint."""
    shape, lines = (2, 2), []
    model, optimizer = made(shape, 2)
    values = full(model, optimizer)
    with FullyShardedDataParallel.state_dict_type(model, SHARDED):
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/wrapper")
    mesh = mesh_of(*shape)
    readers = []
    for package in (torchs, flatfsdp):
        net = parallelized(seeded(), mesh["tp"], sequence=True)
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
        for block in net.blocks:
            package.fully_shard(block, mesh=mesh["dp"])
        package.fully_shard(net, mesh=mesh["dp"])
        readers.append(net)
    names = [name for name in values if name in readers[0].state_dict()]
    for what, net, source in (("torch's", readers[0], "wrapper"), ("ours", readers[1], "wrapper")):
        target = {"model": {name: value for name, value in net.state_dict().items() if isinstance(value, DTensor)}}
        dcp.load(target, checkpoint_id=f"{folder}/{source}")
        found = {name: value.full_tensor() for name, value in target["model"].items()}
        lines += unlike(found, {name: values[name] for name in names if name in found}, what)
    return lines


def test_sharded_state_dicts_are_read_by_fully_shard(pool4: Run, tmp_path: Path) -> None:
    assert not [line for lines in pool4(to_torchs, str(tmp_path)) for line in lines]


def flat_shards(rank: int, world: int, folder: str) -> list[str]:
    """LOCAL_STATE_DICT loads where it was made, and is in no checkpoint, which could not distinguish ranks."""
    model, _ = made((2, 2), 1)
    other, _ = made((2, 2), 0)
    with FullyShardedDataParallel.state_dict_type(model, LOCAL):
        saved = model.state_dict()
        with pytest.raises(CheckpointException, match=r"is a flat shard \(LOCAL_STATE_DICT\)"):
            dcp.save({"model": saved}, checkpoint_id=folder)
        with pytest.raises(UsageError, match=r"is a flat shard \(LOCAL_STATE_DICT\)"):
            checkpoint.save(f"{folder}.ours", model=saved)
    with FullyShardedDataParallel.state_dict_type(other, LOCAL):
        other.load_state_dict(saved)
    values = []
    for each in (other, model):
        with FullyShardedDataParallel.state_dict_type(each, FULL):
            values.append(each.state_dict())
    return unlike(*values, "loaded")


def test_flat_shards_stay_with_their_ranks(pool4: Run, tmp_path: Path) -> None:
    assert not [line for lines in pool4(flat_shards, str(tmp_path / "dcp")) for line in lines]


def as_dtensors(rank: int, world: int) -> list[str]:
    """Values that are DTensors of both dimensions, and those of intervals, know their wholes."""
    model, one = sharded((2, 2)), seeded().state_dict()
    config = ShardedStateDictConfig(sharded_as="dtensor")
    with FullyShardedDataParallel.state_dict_type(model, SHARDED, config):
        saved = model.state_dict()
        lines = unlike({name: value.full_tensor() for name, value in saved.items()}, one, "DTensors")
        model.load_state_dict(saved)
    with FullyShardedDataParallel.state_dict_type(model, SHARDED):
        lines += unlike({name: value.full_tensor() for name, value in model.state_dict().items()}, one, "intervals")
    return lines


def test_values_know_their_wholes(pool4: Run) -> None:
    assert not [line for lines in pool4(as_dtensors) for line in lines]
