"""`tools/bench` from end to end on a tiny model: its measurements, comparisons and files. This process is all ranks."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness.thorough import is_thorough
from tools.benchmark import __main__ as bench
from tools.benchmark import host, pages, profile, rounds, shared_memory, shared_memory_table
from tools.benchmark.models import tiny_case
from tools.benchmark.ranks import World

pytestmark = pytest.mark.single_process

TINY = tiny_case(4, 2)
ENGINES = ["flatfsdp", "fsdp1", "ddp", "floor"]


@contextmanager
def one_rank(backend: str) -> Iterator[None]:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def here(world: World, job: Callable[..., Any], *args: Any) -> list[Any]:
    with one_rank(world.backend) if world.backend else nullcontext():
        return [job(0, *args)]


@pytest.fixture(autouse=True)
def small_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds.ranks, "run", here)
    monkeypatch.setattr(host, "UNITS", 2)
    monkeypatch.setattr(host, "STEPS", 1)
    monkeypatch.setattr(bench, "HOST_WORLDS", (8,))
    monkeypatch.setattr(bench, "MODELS", {TINY.name: TINY})
    monkeypatch.setattr(bench, "SWEEPS", {"Tiny": {"4": TINY}, "Tiny again": {"4": TINY}})
    monkeypatch.setattr(bench.memory, "preload", lambda: False)  # this process has started already


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[str, dict[str, Any]]:
    """The table and the data of a run that succeeds and draws a picture."""
    settings = ["--rounds", "2", "--steps", "1", "--engines", ",".join(ENGINES), "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", ["bench", *settings, *arguments])
    assert bench.main() == 0
    (picture,) = folder.glob("*.png")
    assert picture.stat().st_size > 10_000
    return picture.with_suffix(".md").read_text(), json.loads(picture.with_suffix(".json").read_text())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_engines_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, data = written(tmp_path, monkeypatch)
    order = [(cell["round"], cell["engine"]) for cell in data["cells"]]
    turns = [[*ENGINES, "exchange"], [*ENGINES[1:], ENGINES[0], "exchange"]]
    assert order == [(number, engine) for number, turn in enumerate(turns) for engine in turn]
    assert {(each["engine"], each["strategy"]) for each in data["figures"]} == {
        *((engine, strategy) for engine in ENGINES[:2] for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")),
        ("ddp", "FULL_SHARD"),
        ("floor", "FULL_SHARD"),
    }
    assert "| invalid" not in text and "failed" not in text
    base = next(line for line in text.splitlines() if line.startswith("| FSDP1 |"))
    assert base.split(" | ")[5] == "1.00"  # its ratio to itself
    assert "| engine | 2 tensors, 8 ranks | 12 tensors, 8 ranks |" in text


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_sizes_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = ENGINES if is_thorough() else ENGINES[:2]  # above they are all measured
    text, _ = written(tmp_path, monkeypatch, "--sweep", "--engines", ",".join(engines))
    assert text.count("| engine | 4 |") == 2 and "| invalid" not in text


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_an_engine_that_fails_does_not_go_unnoticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(world: World, job: Callable[..., Any], *args: Any) -> list[Any]:
        if any(getattr(each, "engine", "") == "floor" for each in args):
            raise rounds.RankFailed("rank 0: Traceback\nValueError: no")
        return here(world, job, *args)

    monkeypatch.setattr(rounds.ranks, "run", failing)
    monkeypatch.setattr(sys, "argv", ["bench", "--quick", "--engines", "ddp,floor", "--out", str(tmp_path)])
    monkeypatch.setattr(bench, "QUICK", (TINY.name,))
    assert bench.main() == 1
    assert "- one process: ValueError: no" in (tmp_path / "results.md").read_text()


SAMPLER = """#!/bin/bash
while [ "$1" != --output ]; do shift; done
trap 'printf "train_step (clock.py:1);run (flatfsdp/unit.py:1) 3\\ntrain_step (clock.py:1) 1\\n" > "$2"; exit' INT
while true; do sleep 0.05; done
"""


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("ignored", [False, True])
def test_steps_are_sampled_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignored: bool) -> None:
    """Also in a shell's background job, which is started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else None
    try:
        _sample_steps(tmp_path, monkeypatch)
    finally:
        if ignored:
            signal.signal(signal.SIGINT, before)


def _sample_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "SAMPLED", 0.01)
    monkeypatch.setattr(sys, "argv", ["bench", "--profile", "--engines", "flatfsdp,ddp", "--out", str(tmp_path)])
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert bench.main() == 2
    (tmp_path / "py-spy").write_text(SAMPLER)
    (tmp_path / "py-spy").chmod(0o755)
    assert bench.main() == 0
    found = json.loads((tmp_path / "profile.json").read_text())["profile"]
    assert [cell["ranks"][0]["owners"] for cell in found] == [{"flatfsdp/unit.py": 3, "rest": 1}] * 2
    whole = found[0]["ranks"][0]["cpu"] * 1000
    text = (tmp_path / "profile.md").read_text()
    assert f"flatfsdp, by file: flatfsdp/unit.py {0.75 * whole:.1f}." in text


def tiny_part(pages: bool, *engines: str) -> tuple[int, tuple[shared_memory.Comparison, ...]]:
    return 2, (shared_memory.Comparison(TINY, "SHARD_GRAD_OP", 1, engines, steps=1, pages=pages),)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_parts_write_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file has its measurement, and the table has all of them."""
    parts = {
        "gpt": tiny_part(False, "flatfsdp", "fsdp1", "ddp", "floor", "exchange"),
        "memory": tiny_part(True, "flatfsdp", "ddp"),
    }
    monkeypatch.setattr(shared_memory, "PARTS", parts)
    monkeypatch.setattr(pages, "LONG", 0.01)
    title = "2 tensors, SHARD_GRAD_OP, 1 ranks"
    monkeypatch.setattr(shared_memory_table, "GOALS", ((title, "flatfsdp", "step", "ddp", 1e-9),))
    for part, minutes in (("gpt", "9"), ("memory", "0")):
        arguments = ["--shared-memory", part, "--minutes", minutes, "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        assert bench.main() == 0
    found = json.loads((tmp_path / "shared_memory" / "gpt.json").read_text())
    assert [cell["round"] for cell in found["cells"]] == [0] * 5 + [1] * 5
    found = json.loads((tmp_path / "shared_memory" / "memory.json").read_text())
    assert [(cell["round"], cell["engine"]) for cell in found["pages"]] == [(0, "flatfsdp"), (0, "ddp")]  # no more time
    assert all(cell["ranks"][0]["phases"]["steps"]["most"]["pss"] > 2**20 for cell in found["pages"])
    text = (tmp_path / "shared_memory.md").read_text()
    assert text.count(f"### {title}") == 2 and "| invalid" not in text and "failed" not in text
    assert "tools/bench --shared-memory memory" in text
    assert "| 1e-09 |" in text and "**not met**" in text
