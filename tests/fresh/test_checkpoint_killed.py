"""A rank that is killed while it saves: the others are told, and the checkpoint from before is there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flatfsdp import checkpoint
from flatfsdp.checkpoint.disk import Disk, through
from flatfsdp.errors import CheckpointError
from tests.harness import fresh


class Fatal(Disk):
    """Ends the process, as the kernel would, at the first write of a checkpoint's data."""

    def before(self, operation: str, path: Path, size: int) -> None:
        if operation == "write" and path.name.endswith(".distcp"):
            os.kill(os.getpid(), signal.SIGKILL)


def state(rank: int, number: float) -> dict[str, Any]:
    return {f"part{rank}": torch.full((100,), number), "shared": torch.full((3,), number)}


def save_and_die(rank: int, world: int, path: str) -> float:
    dist.init_process_group("gloo")
    checkpoint.save(path, model=state(rank, 1.0))
    start = time.monotonic()
    try:
        with through(Fatal() if rank == 1 else Disk()):
            checkpoint.save(path, model=state(rank, 2.0), overwrite=True)
    except CheckpointError as error:
        assert f"saving {path}: rank 1 was killed, or crashed: process " in str(error)
        return time.monotonic() - start
    raise AssertionError("the save came to an end without one of its ranks")


def test_a_killed_rank_ends_the_save_of_all_and_costs_no_checkpoint(tmp_path: Path) -> None:
    survivor, killed = fresh.run(2, save_and_die, str(tmp_path / "x"))
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.error is None and survivor.result < 40.0, survivor.error
    parts = {"part0": torch.zeros(100), "part1": torch.zeros(100), "shared": torch.zeros(3)}
    checkpoint.load(tmp_path / "x", model=parts)
    assert all(torch.equal(value, torch.ones_like(value)) for value in parts.values())
    checkpoint.save(tmp_path / "x", model=parts, overwrite=True)  # what the killed one left is cleared up
    assert {each.name for each in tmp_path.iterdir()} == {"x"}
