"""Buffers that differ between ranks: gathered and written values are rank 0's; those that one rank has are its own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatfsdp import FullStateDictConfig, FullyShardedDataParallel, checkpoint
from flatfsdp.checkpoint.conversion import read_state
from flatfsdp.errors import AgreementError, FlatFSDPWarning
from tests.conftest import Run
from tests.harness.corners import Setting, joined

pytestmark = pytest.mark.distributed

as_type = FullyShardedDataParallel.state_dict_type


class Normed(nn.Module):
    """Buffers in two units; of two dtypes, one without dimensions, one on some ranks of another shape."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.last = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("seen", torch.zeros(2 + rank))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def normed(rank: int, setting: Setting, *, shapes: bool = False) -> Any:
    torch.manual_seed(0)
    model = setting.wrap(Normed(rank * shapes), (nn.Sequential,))
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(rank + 1)
    return model


def sources(state: Any) -> set[int]:
    """The ranks whose buffers are in `state`."""
    return {
        int(value.flatten()[0]) - 1 for key, value in state.items() if "running" in key or "num" in key or "seen" in key
    }


def in_state_dicts(rank: int, world: int, settings: tuple[Setting, ...]) -> list[str]:
    lines = []
    for setting in settings:
        own = {rank}
        model = normed(rank, setting, shapes=True)
        found = {"FULL": model.state_dict(), "part": model.module.first[1].state_dict()}
        with as_type(model, "FULL", FullStateDictConfig(rank0_only=True)):
            found["rank 0 only"] = model.state_dict()
        for kind in ("SHARDED", "LOCAL"):
            with as_type(model, kind):
                found[kind] = model.state_dict()
        expected = {"FULL": {0}, "part": {0}, "rank 0 only": {0} if rank == 0 else set()}
        for what, state in found.items():
            if sources(state) != expected.get(what, own):
                lines.append(f"{setting}: {what} on rank {rank} has those of {sources(state)}")
        if found["FULL"]["seen"].shape != (2,):
            lines.append(f"{setting}: rank {rank} has rank 0's buffer as {found['FULL']['seen'].shape}")
        if any(set(buffer.flatten().tolist()) != {rank + 1} for buffer in model.buffers()):
            lines.append(f"{setting}: the model's own buffers of rank {rank} changed")
    return lines


BOTH = (Setting(orig=True), Setting(orig=False, strategy="SHARD_GRAD_OP"))


def test_what_is_gathered_is_rank_0s(pool2: Run) -> None:
    assert not joined(pool2(in_state_dicts, (*BOTH, Setting("NO_SHARD"))))


def test_of_hybrids(pool4: Run) -> None:
    assert not joined(pool4(in_state_dicts, (Setting("HYBRID_SHARD"),)))


def alone(rank: int, world: int) -> list[set[int]]:
    model = normed(rank, Setting("NO_SHARD"))
    without = Setting("NO_SHARD").wrap(nn.Linear(4, 4), ())
    for each in (model, without):
        each.check_is_root()  # compares the models of all ranks
    found = [set[int](), set[int]()]
    if rank == 0:
        with as_type(model, "FULL", FullStateDictConfig(rank0_only=True)):
            found[0] = sources(model.state_dict())
    if rank == 1:
        found[1] = set(range(len(without.state_dict())))
    dist.barrier()
    return found


def test_where_nothing_is_sharded_one_rank_may_call_alone_for_rank_0_or_without_buffers(pool2: Run) -> None:
    assert pool2(alone) == [[{0}, set()], [set(), {0, 1}]]


def alone_with_buffers(rank: int, world: int) -> str:
    model, x = normed(rank, Setting("NO_SHARD")), torch.ones(4, 4)
    model(x)
    try:
        model.state_dict() if rank == 0 else model(x).sum().backward()
    except AgreementError as error:
        return str(error)
    return "nothing"


def test_where_nothing_is_sharded_a_call_of_one_rank_ends_in_an_error(pool2: Run) -> None:
    for text in pool2(alone_with_buffers):
        assert "state_dict()" in text, text


def written(rank: int, world: int, path: str) -> list[str]:
    model = normed(rank, Setting())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("once", "twice"):
            checkpoint.save(f"{path}/{name}", model=model)
        checkpoint.save(f"{path}/weights", model=model, model_format="safetensors")
    checkpoint.export_safetensors(model, f"{path}/export")
    return [str(each.message) for each in caught if issubclass(each.category, FlatFSDPWarning)]


def alike(rank: int, world: int, path: str) -> list[str]:
    model = normed(0, Setting())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.save(f"{path}/alike", model=model)
    return [str(each.message) for each in caught if issubclass(each.category, FlatFSDPWarning)]


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_written_is_rank_0s_and_reported_once(run: Run, tmp_path: Path, world: int) -> None:
    texts, *others = run(world, written, str(tmp_path))
    assert len(texts) == 1 and "buffers differ between ranks" in texts[0] and "first.1.running_mean" in texts[0], texts
    assert not any(others)
    for name in ("once", "twice", "weights"):
        assert sources(read_state(tmp_path / name, trust=False)["model"]) == {0}
    assert sources(read_state(tmp_path / "export", trust=False)) == {0}
    assert run(world, alike, str(tmp_path)) == [[]] * world
