"""A rank that is killed while it saves: the others get an error, and the checkpoint from before is there."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import checkpoint
from flatfsdp.checkpoint import lock
from flatfsdp.checkpoint.disk import Disk, through
from flatfsdp.errors import CheckpointError, FlatFSDPWarning
from flatfsdp.trainer.state.checkpoints import CheckpointManager
from flatfsdp.trainer.state.components import Component, Sharing
from tests.harness import fresh
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.process


class Fatal(Disk):
    """Ends the process, as the kernel would, ahead of operation number ``moment`` that changes something, counted from
    the first write of a checkpoint's data, or, if `early`, from the first of all."""

    def __init__(self, moment: int = 0, *, early: bool = False) -> None:
        self.moment, self.began = moment, early

    def before(self, operation: str, path: Path, size: int) -> None:
        self.began = self.began or (operation == "write" and path.name.endswith(".distcp"))
        if self.began and operation not in ("read", "open"):
            self.moment -= 1
            if self.moment < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def state(rank: int, number: float) -> dict[str, Any]:
    return {f"part{rank}": torch.full((100,), number), "shared": torch.full((3,), number)}


def save_and_die(rank: int, world: int, folder: str) -> float:
    dist.init_process_group("gloo")
    path = f"{folder}/x"
    checkpoint.save(path, model=state(rank, 1.0))
    start = time.monotonic()
    try:
        with through(Fatal() if rank == 1 else Disk()):
            checkpoint.save(path, model=state(rank, 2.0), overwrite=True)
    except CheckpointError as error:
        assert f"saving {path}: rank 1 was killed, or crashed: process " in str(error)
        return time.monotonic() - start
    raise AssertionError("the save came to an end without one of its ranks")


@pytest.mark.ranks(2, save_and_die, in_folder=True)
def test_a_killed_rank_ends_the_save_of_all_and_costs_no_checkpoint(
    outcomes: list[fresh.Outcome], folder: Path
) -> None:
    survivor, killed = outcomes
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.error is None and survivor.result < 40.0, survivor.error
    parts = {"part0": torch.zeros(100), "part1": torch.zeros(100), "shared": torch.zeros(3)}
    checkpoint.load(folder / "x", model=parts)
    assert all(torch.equal(value, torch.ones_like(value)) for value in parts.values())
    checkpoint.save(folder / "x", model=parts, overwrite=True)  # the remains of the killed one are removed
    assert {each.name for each in folder.iterdir()} == {"x"}


def save_and_die_at(rank: int, world: int, folder: str, victim: int, moment: int) -> str:
    dist.init_process_group("gloo")
    path = f"{folder}/x"
    checkpoint.save(path, model=state(rank, 1.0))
    try:
        with through(Fatal(moment, early=True) if rank == victim else Disk()):
            checkpoint.save(path, model=state(rank, 2.0), overwrite=True)
    except CheckpointError as error:
        return str(error)
    return ""


# The first rank acts on folders and has the lock, the other one only writes its file.
@pytest.mark.ranks(2, save_and_die_at, in_folder=True, of=["victim", "moment"])
@pytest.mark.parametrize(
    ("victim", "moment"),
    [(0, moment) for moment in (range(60) if is_thorough() else (13,))]
    + [(1, moment) for moment in (range(8) if is_thorough() else ())],
)
def test_whichever_rank_is_killed_and_when_a_good_checkpoint_is_there(
    outcomes: list[fresh.Outcome], folder: Path, monkeypatch: Any, victim: int, moment: int
) -> None:
    monkeypatch.setattr(lock, "EMPTY", 0.5)
    if outcomes[victim].exit_code != -signal.SIGKILL:
        assert is_thorough(), "the save has fewer operations"
    parts = {"part0": torch.zeros(100), "part1": torch.zeros(100), "shared": torch.zeros(3)}
    checkpoint.load(folder / "x", model=parts)
    number = parts["shared"][0].item()
    assert number in (1.0, 2.0) and all(torch.equal(each, torch.full_like(each, number)) for each in parts.values())
    start = time.monotonic()
    checkpoint.save(folder / "x", model=parts, overwrite=True)  # the remains of the killed one delay no other process
    assert time.monotonic() - start < 10.0
    assert {each.name for each in folder.iterdir()} == {"x"}


class FatalForWeights(Disk):
    """Ends the process at the first elements that it writes of a model, in any thread."""

    def before(self, operation: str, path: Path, size: int) -> None:
        if operation == "write" and path.suffix == ".safetensors":
            os.kill(os.getpid(), signal.SIGKILL)


def progress(step: int) -> list[Component]:
    return [Component("progress", sharing=Sharing.GLOBAL, save=lambda: {"step": step}, load=print)]


def train_and_die(rank: int, world: int, path: str) -> float:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = FSDP(torch.nn.Linear(40, 40), use_orig_params=True)
    model(torch.zeros(2, 40)).sum().backward()
    manager = CheckpointManager(path)
    manager.save(1, model=model, components=progress(1))
    manager.finish()
    start = time.monotonic()
    with through(FatalForWeights() if rank == 1 else Disk()):
        manager.save(2, model=model, components=progress(2))
        try:
            manager.finish()
        except CheckpointError as error:
            assert f"saving {path}/step-00000002: rank 1 was killed, or crashed: process " in str(error)
            return time.monotonic() - start
    raise AssertionError("the save came to an end without one of its ranks")


@pytest.mark.ranks(2, train_and_die, in_folder=True, timeout=150.0)
def test_a_rank_killed_while_a_thread_saves_costs_no_checkpoint(outcomes: list[fresh.Outcome], folder: Path) -> None:
    survivor, killed = outcomes
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.error is None and survivor.result < 120.0, survivor.error
    manager = CheckpointManager(folder, keep_last=1, asynchronous=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlatFSDPWarning)
        found = manager.find("latest")
    assert found == folder / "step-00000001"
    model, expected = torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)
    torch.manual_seed(0)
    expected.reset_parameters()
    assert manager.load(found, model=model, components=progress(0)).step == 1
    assert torch.equal(model.weight, expected.weight) and torch.equal(model.bias, expected.bias)
    manager.save(3, model=model)  # and the remains of the killed one are removed
    assert {each.name for each in folder.iterdir()} == {"step-00000003"}
