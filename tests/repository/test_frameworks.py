"""Accelerate, Lightning and the Trainer of transformers, which know torch's FSDP1 only, train and resume on flatfsdp
as they do under DDP. Skipped where they are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parents[1] / "programs"


def numbers(folder: Path, program: str, *arguments: str | Path) -> list[float]:
    """The losses that the program prints on two ranks; under as_torch unless its first argument is ddp."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    plain = arguments[0] == "ddp"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [*([] if plain else ["-m", "flatfsdp.as_torch"]), str(PROGRAMS / program), *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert plain or {line[1].split(".")[0] for line in lines if line[:1] == ["MODEL"]} == {"flatfsdp"}
    return [float(line[1]) for line in lines if line[:1] == ["LOSS"]]


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    expected = numbers(tmp_path, "with_accelerate.py", "ddp")
    assert len(expected) == 11
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        folder = tmp_path / kind
        found = numbers(tmp_path, "with_accelerate.py", kind, folder, "save")
        found += numbers(tmp_path, "with_accelerate.py", kind, folder, "load")
        assert found == pytest.approx(expected, abs=2e-5), kind


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    expected = numbers(tmp_path, "with_lightning.py", "ddp")
    assert len(expected) == 8
    for kind in ("full", "sharded"):
        (tmp_path / kind).mkdir()
        assert numbers(tmp_path, "with_lightning.py", kind, tmp_path / kind) == pytest.approx(expected, abs=2e-5), kind


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    expected = numbers(tmp_path, "with_trainer.py", "ddp", tmp_path / "ddp")
    assert len(expected) == 12
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        found = numbers(tmp_path, "with_trainer.py", kind, tmp_path / kind)
        assert found == pytest.approx(expected, abs=2e-5), kind
