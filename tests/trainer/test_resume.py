"""Runs that end before their time, by SIGTERM or kill -9, and go on on the same or another number of ranks."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.harness import commands
from tests.harness.thorough import is_thorough
from tests.programs.resumable import EPOCHS, GLOBAL_BATCH, SAMPLES, SAVE_EVERY

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
STEPS = -(-SAMPLES * EPOCHS // GLOBAL_BATCH)


def start(output: Path, ranks: int, *options: float | str) -> subprocess.CompletedProcess[str]:
    """One run of the program, until its own end or a signal."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), clean.get("PYTHONPATH", "")])}
    module = "tests.programs.resumable"
    return commands.run("-m", module, output, ranks, *options, folder=Path.cwd(), environment=clean, limit=240)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(output: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(output / "metrics.jsonl") if "loss" in row}


def seen(output: Path) -> list[tuple[int, list[int]]]:
    """(step, ids of all ranks), in the order of the log; forgets it, so that each run's is read once."""
    steps: dict[int, list[int]] = {}
    for path in sorted(output.glob("ids-*.jsonl")):
        for row in rows(path):
            steps.setdefault(row["step"], []).extend(row["ids"])
        path.unlink()
    return sorted(steps.items())


def kept(runs: Iterable[list[tuple[int, list[int]]]]) -> list[list[int]]:
    """The samples of each step as the model has seen them: a resumed run replaces the steps after the checkpoint
    that it resumes from."""
    steps: dict[int, list[int]] = {}
    for each in runs:
        first = each[0][0]
        assert first <= len(steps) + 1, "no step is left out"
        steps = {step: ids for step, ids in steps.items() if step < first}
        steps.update(each)
    assert list(steps) == list(range(1, len(steps) + 1))
    return [sorted(ids) for ids in steps.values()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], dict[int, float]]:
    """Samples and losses of an uninterrupted run of one process, without dropout."""
    output = tmp_path_factory.mktemp("whole")
    done = start(output, 1, 0.0)
    assert done.returncode == 0, done.stderr
    return kept([seen(output)]), losses(output)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], dict[int, float]]:
    """The same on two ranks, with dropout."""
    output = tmp_path_factory.mktemp("undisturbed")
    done = start(output, 2, 0.2)
    assert done.returncode == 0, done.stderr
    return kept([seen(output)]), losses(output)


def test_the_whole_run_sees_each_sample_once_an_epoch(
    whole: tuple[list[list[int]], dict[int, float]], undisturbed: tuple[list[list[int]], dict[int, float]]
) -> None:
    ids, found = whole
    assert [len(step) for step in ids] == [GLOBAL_BATCH] * (STEPS - 1) + [SAMPLES * EPOCHS - GLOBAL_BATCH * (STEPS - 1)]
    assert sorted(each for step in ids for each in step) == sorted([*range(SAMPLES)] * EPOCHS)
    assert undisturbed[0] == ids
    assert found[STEPS] < found[1]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"] if is_thorough() else ["SIGTERM"])
def test_a_signal_in_any_step_changes_nothing_on_as_many_ranks(
    undisturbed: tuple[list[list[int]], dict[int, float]], tmp_path: Path, name: str
) -> None:
    """With dropout: random numbers go on, too."""
    at = random.randrange(8, 29)  # of 3 microbatches a step: in the third step to the tenth
    first = start(tmp_path, 2, 0.2, name, at)
    assert first.returncode == (128 + 15 if name == "SIGTERM" else 1), f"{at}: {first.stderr}"
    runs = [seen(tmp_path)]
    steps = [int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*")]
    if name == "SIGTERM":
        assert steps == [len(runs[0])], f"{at}: a checkpoint of the last step"
    assert start(tmp_path, 2, 0.2).returncode == 0
    runs.append(seen(tmp_path))
    assert runs[1][0][0] == max(steps, default=0) + 1, f"{at}: nothing was trained twice, nothing lost"
    assert (kept(runs), losses(tmp_path)) == undisturbed, at


def test_killed_on_two_ranks_stopped_on_three_and_ended_on_one(
    whole: tuple[list[list[int]], dict[int, float]], tmp_path: Path
) -> None:
    runs = []
    killed = start(tmp_path, 2, 0.0, "SIGKILL", 26)  # in the ninth step; saves were begun after the third and the sixth
    assert killed.returncode == 1
    runs.append(seen(tmp_path))
    complete = max(int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*"))
    assert SAVE_EVERY <= complete <= len(runs[0]) <= 8
    stopped = start(tmp_path, 3, 0.0, "SIGTERM", 6)  # of two microbatches a step
    assert stopped.returncode == 128 + 15, stopped.stderr
    runs.append(seen(tmp_path))
    # The other rank may have ended between the last file of a checkpoint and its name, which the next run gives it.
    resumed = runs[1][0][0] - 1
    assert complete <= resumed <= len(runs[0]) and resumed % SAVE_EVERY == 0, "no complete checkpoint was lost"
    ended = start(tmp_path, 1, 0.0)
    assert ended.returncode == 0, ended.stderr
    runs.append(seen(tmp_path))
    ids, found = whole
    assert kept(runs) == ids
    assert losses(tmp_path) == pytest.approx(found, rel=1e-5)
