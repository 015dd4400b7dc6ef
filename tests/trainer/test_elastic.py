"""A run with `[elastic]` outlives killed ranks: the same losses, metrics and parameters as the undisturbed run."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from flatfsdp import FullStateDictConfig, FullyShardedDataParallel, checkpoint
from flatfsdp.checkpoint.ranks import CheckpointRanks
from flatfsdp.trainer import CausalLM, FSDPArguments, Task, Trainer, TrainingArguments
from flatfsdp.trainer.arguments import ElasticArguments
from flatfsdp.trainer.callbacks import Callback, MetricsLog, Summary, read_metrics
from flatfsdp.trainer.run import Run, StepReport
from tests.elastic import test_joining
from tests.harness import fresh
from tests.trainer.test_same_bits import Dropping, sentences
from tests.trainer.test_train import TEXT, TINY, facts
from tests.trainer.test_train import train as run_command

pytestmark = pytest.mark.process

STEPS = 6


class Kill(Callback):
    """Kills this rank in the backward of a step, or in the save after it. Its own state goes back."""

    def __init__(self, step: int, moment: str) -> None:
        self.step, self.moment = step, moment
        self.losses: list[float] = []

    def on_step_begin(self, trainer: Run, step: int) -> None:
        if step == self.step and self.moment == "backward":
            leaves = [each for each in trainer.model.modules() if not list(each.children())]
            leaves[-2].register_full_backward_pre_hook(lambda *unused: os.kill(os.getpid(), signal.SIGKILL))

    def on_evaluation(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        if trainer.progress.step == self.step and self.moment == "save":
            exchange, numbers = CheckpointRanks.exchange, itertools.count()

            def dies(*given: Any) -> Any:
                if next(numbers) == 5:  # files are open
                    os.kill(os.getpid(), signal.SIGKILL)
                return exchange(*given)

            CheckpointRanks.exchange = dies  # type: ignore

    def on_step(self, trainer: Run, report: StepReport) -> None:
        self.losses.append(report.loss)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses = [*state["losses"]]


class Holds(Callback):
    """Step 3 waits for process 2, which comes in it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_step_begin(self, trainer: Run, step: int) -> None:
        test_joining.hold({2: 3}, self.rank, step)


def train(
    rank: int,
    world: int,
    output: Path,
    kills: Mapping[int, tuple[int, str]],
    given: dict[str, Any],
    front: Any,
    joins: bool = False,
    **sharded: Any,
) -> tuple[list[float], str, dict[str, str]]:
    """The losses of a run, a hash of its parameters, and its last screen. `joins`: process 2 comes later."""
    if joins:
        test_joining.begin(2, {2: 3}, "0", {}, test_joining.nothing, rank)
    kill = Kill(*kills.get(rank, (0, "")))
    settings: dict[str, Any] = {
        "steps": STEPS, "batch": 2, "global_batch": 9, "lr": 0.05, "device": "cpu", "clip": 0.5, "eval_every": 2,
        "save_every": 2, "progress": False, "output": output, "warmup_steps": 2, "keep_last": 9,
    }  # fmt: skip
    trainer = Trainer(
        Task(model=Dropping, train_data=sentences, eval_data=sentences, objective=CausalLM()),
        TrainingArguments(**settings | given),
        FSDPArguments(deterministic_sums=True, front=front, **sharded),
        ElasticArguments(enabled=world > 1),
        callbacks=[kill, MetricsLog(), *([Holds(rank)] if joins else [])],
    )
    result = trainer.train()
    made = hashlib.sha256()
    with FullyShardedDataParallel.state_dict_type(trainer.model, "FULL", FullStateDictConfig()):
        for value in trainer.model.state_dict().values():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            made.update(bytes(whole.contiguous().view(-1).view(torch.uint8).tolist()))
    return kill.losses, made.hexdigest(), Summary.facts(trainer, result)


CASES: dict[str, tuple[dict[int, tuple[int, str]], dict[str, Any], str, int]] = {
    "in a backward": (
        {0: (4, "backward")},
        {"data_mode": "dispatch", "audit_every": 2, "save_async": False},
        "wrapper",
        4,
    ),
    "in a save": ({0: (4, "save")}, {"save_async": False}, "fully_shard", 5),
    "in a save in the background": ({1: (4, "save")}, {}, "wrapper", 5),
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder and the result of the run on one rank that nothing happens to."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    (alone,) = fresh.run(1, train, folder, {}, {}, "wrapper")
    assert alone.error is None and len(alone.result[0]) == STEPS, alone
    return folder, alone.result


@pytest.mark.parametrize("case", CASES)
def test_killed_ranks_cost_nothing(case: str, undisturbed: tuple[Path, Any], tmp_path: Path) -> None:
    """Rank 0, which reads, prints and writes for all, and ranks in the middle of a save, which is made again."""
    kills, given, front, step = CASES[case]
    alone, expected = undisturbed
    folder = tmp_path / "three"
    for rank, outcome in enumerate(fresh.run(3, train, folder, kills, given, front)):
        if rank in kills:
            assert outcome.exit_code == -signal.SIGKILL, outcome
            continue
        assert outcome.error is None and outcome.exit_code == 0, outcome
        losses, digest, screen = outcome.result
        assert (losses, digest) == expected[:2]
        words = rf"the loss of rank {next(iter(kills))} in step {step}, in \d+\.\d s, by 2 ranks"
        assert re.fullmatch(words, screen["survived"]) and "joined" not in screen, screen
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, STEPS + 1)]
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4, 6]
    assert [row["eval_loss"] for row in rows if "eval_loss" in row] == [
        row["eval_loss"] for row in read_metrics(alone / "metrics.jsonl") if "eval_loss" in row
    ]
    names = [f"step-{number:08}" for number in (2, 4, 6)]
    assert sorted(each.name for each in folder.glob("*step-*") if not each.name.endswith(".token")) == names
    assert [each.problem for each in checkpoint.listing(folder, named="step-*")] == [""] * 3


@pytest.mark.parametrize(
    ("front", "given", "sharded"),
    [("wrapper", {"data_mode": "dispatch"}, {}), ("fully_shard", {}, {"strategy": "hybrid_shard", "replicas": 2})],
)
def test_a_process_that_comes_later_joins(
    front: str, given: Any, sharded: Any, undisturbed: tuple[Path, Any], tmp_path: Path
) -> None:
    """It knows what the others know of the run, and reads its part of the data."""
    _, expected = undisturbed
    for outcome in fresh.run(3, train, tmp_path / "three", {}, given, front, joins=True, **sharded):
        assert outcome.error is None and outcome.exit_code == 0, outcome
        losses, digest, screen = outcome.result
        assert (losses, digest) == expected[:2]
        assert re.fullmatch(r"rank 2 in step \d, 3 ranks from then on", screen["joined"]), screen
        assert screen["ranks"].startswith("3 on cpu") and screen["eval loss"] == expected[2]["eval loss"]
        assert screen["checkpoint"] == str(tmp_path / "three" / "step-00000006")


def test_a_process_joins_when_another_is_lost_after_a_save(undisturbed: tuple[Path, Any], tmp_path: Path) -> None:
    """The others have a checkpoint of step 2 when they go back to where there was none, with one that knows of none."""
    _, expected = undisturbed
    folder, given = tmp_path / "three", {"save_async": False, "eval_every": None}
    outcomes = fresh.run(3, train, folder, {1: (3, "backward")}, given, "wrapper", joins=True)
    assert outcomes.pop(1).exit_code == -signal.SIGKILL
    for outcome in outcomes:
        assert outcome.error is None and outcome.exit_code == 0, outcome
        losses, digest, screen = outcome.result
        assert (losses, digest) == expected[:2]
        assert screen["joined"] == "rank 2 in step 3, 2 ranks from then on", screen
        assert screen["survived"].startswith("the loss of rank 1 in step 3, "), screen  # one that joins knows, too
    assert [each.problem for each in checkpoint.listing(folder, named="step-*")] == [""] * 3


KILLS = """
import multiprocessing, os, signal, time
from pathlib import Path
import torch
from flatfsdp.elastic.survive import Survival
from flatfsdp.trainer import Callback

class Returns(Callback):
    # A rank that is lost in step 2, the first, which writes and prints, and in step 3 the others wait until it joins.
    def on_step_begin(self, run, step):
        if step == 2 and os.environ["RANK"] == "0" and not Path("lost").exists():
            Path("lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while step == 3 and not Path("back").exists():
            time.sleep(0.01)

    def on_other_ranks(self, run):
        self.folder = run.output  # of one that joins, too

    def on_end(self, run, result):
        assert self.folder == Path("here") and run.world.size == 2 and not run.world.joins

reach = Survival.reach

def reaches(self):
    found = reach(self)
    Path("back").touch()
    return found

Survival.reach = reaches

class Lost(Callback):
    def on_step_begin(self, run, step):
        if step == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 5 and os.environ["RANK"] == "0":
            raise ValueError("out of luck")

class Alone(Callback):
    def on_end(self, run, result):
        assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])  # more threads add up in another order

class Stopped(Callback):
    def on_step_begin(self, run, step):
        if step == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)

class Fails(Callback):
    def on_step(self, run, report):
        if report.step == 3:
            raise ValueError("out of luck")

class Interrupted(Callback):
    def on_step(self, run, report):
        if report.step == 2 and os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        if report.step == 3 and run.world.leads:
            os.kill(multiprocessing.parent_process().pid, signal.SIGINT)
"""


LOSSES = [(1, 4, 3), (0, 6, 2)]  # a rank that raises ends where all meet again, in the next step


def command(
    callback: str, folder: Path, *given: str, elastic: tuple[str, ...] = ("--elastic",)
) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(KILLS)
    (folder / "text.txt").write_text(TEXT)
    job = ["-m", "flatfsdp.train", *TINY, "--steps", "6", "--no-plot", "--no-progress", "--text", "text.txt"]
    return run_command(*job, "--callbacks", f"mine:{callback}", *elastic, *given, folder=folder)


def test_the_command_survives_lost_ranks(tmp_path: Path) -> None:
    """One that is killed, and then one that raises, which printed and wrote for all."""
    done = command("Lost", tmp_path, "--ranks", "4")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^rank 1 \(process \d+\) has ended: SIGKILL$", done.stderr, re.MULTILINE), done.stderr
    found = facts(done.stdout)
    assert found["ranks"].startswith("2 on cpu") and found["steps"].startswith("6 ("), done.stdout
    words = [rf"the loss of rank {rank} in step {step}, in [\d.]+ s, by {left} ranks" for rank, step, left in LOSSES]
    assert re.fullmatch("; ".join(words), found["survived"]), done.stdout
    raised = r"^rank 0 \(process \d+\) has ended: exit code 1\nTraceback[^\0]*^ValueError: out of luck$"
    assert re.search(raised, done.stderr, re.MULTILINE), done.stderr


def test_a_lost_rank_is_started_again_and_joins(tmp_path: Path) -> None:
    """Losses and the model are those of an undisturbed run, to the bit."""
    settings = ["--global-batch", "8", "--deterministic-sums", "--output", "here"]
    alone = tmp_path / "alone"
    alone.mkdir()
    undisturbed = command("Alone", alone, "--ranks", "1", *settings, elastic=())
    assert undisturbed.returncode == 0, undisturbed.stderr
    done = command("Returns", tmp_path, "--ranks", "2", *settings, "--elastic-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^rank 0 is started again \(process \d+\), to join the others$", done.stderr, re.MULTILINE)
    found = facts(done.stdout)
    assert found["ranks"].startswith("2 on cpu") and found["steps"].startswith("6 ("), done.stdout
    assert re.fullmatch(r"the loss of rank 0 in step 2, in [\d.]+ s, by 1 rank", found["survived"]), done.stdout
    assert re.fullmatch(r"rank 2 in step \d, 2 ranks from then on", found["joined"]), done.stdout
    rows = [read_metrics(each / "here" / "metrics.jsonl") for each in (alone, tmp_path)]
    losses = [[(row["step"], row["loss"], row["lr"], row["tokens"]) for row in its if "loss" in row] for its in rows]
    assert len(losses[0]) == 6 and losses[0] == losses[1]
    assert model_in(alone / "here" / "step-00000006") == model_in(tmp_path / "here" / "step-00000006")


def model_in(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Shape and bytes of each tensor of `model.safetensors`, whose order depends on the number of ranks."""
    data = (folder / "model.safetensors").read_bytes()
    first = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:first])
    its = {name: (str(each["shape"]), each["data_offsets"]) for name, each in header.items() if name != "__metadata__"}
    return {name: (shape, data[first + begin : first + end]) for name, (shape, (begin, end)) in its.items()}


def test_a_stopped_rank_is_killed_when_the_run_has_ended(tmp_path: Path) -> None:
    done = command("Stopped", tmp_path, "--ranks", "2", "--elastic-lost-after", "4")
    assert done.returncode == 0, done.stderr
    assert "is stopped, and the run has ended without it: killed" in done.stderr, done.stderr


def test_a_failure_of_all_ranks_ends_the_command(tmp_path: Path) -> None:
    done = command("Fails", tmp_path, "--ranks", "2")
    assert done.returncode == 1 and "ValueError: out of luck" in done.stderr, done.stderr


def test_an_interrupt_after_a_loss_stops_all_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    done = command("Interrupted", tmp_path, "--ranks", "3")
    assert done.returncode == 128 + signal.SIGINT and "stopped by SIGINT after step" in done.stderr, done.stderr
