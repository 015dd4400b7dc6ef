"""A run with `[elastic]` outlives killed ranks: the same losses, metrics and parameters as the undisturbed run."""

from __future__ import annotations

import hashlib
import itertools
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


def train(
    rank: int, world: int, output: Path, kills: Mapping[int, tuple[int, str]], given: dict[str, Any], front: Any
) -> tuple[list[float], str, str]:
    """The losses of a run, a hash of its parameters, and what its last screen says of lost ranks."""
    kill = Kill(*kills.get(rank, (0, "")))
    settings: dict[str, Any] = {
        "steps": STEPS, "batch": 2, "global_batch": 9, "lr": 0.05, "device": "cpu", "clip": 0.5, "eval_every": 2,
        "save_every": 2, "progress": False, "output": output, "warmup_steps": 2, "keep_last": 9,
    }  # fmt: skip
    trainer = Trainer(
        Task(model=Dropping, train_data=sentences, eval_data=sentences, objective=CausalLM()),
        TrainingArguments(**settings | given),
        FSDPArguments(deterministic_sums=True, front=front),
        ElasticArguments(enabled=world > 1),
        callbacks=[kill, MetricsLog()],
    )
    result = trainer.train()
    made = hashlib.sha256()
    with FullyShardedDataParallel.state_dict_type(trainer.model, "FULL", FullStateDictConfig()):
        for value in trainer.model.state_dict().values():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            made.update(bytes(whole.contiguous().view(-1).view(torch.uint8).tolist()))
    return kill.losses, made.hexdigest(), Summary.facts(trainer, result).get("survived", "")


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


@pytest.mark.parametrize("case", CASES)
def test_killed_ranks_cost_nothing(case: str, tmp_path: Path) -> None:
    """Rank 0, which reads, prints and writes for all, and ranks in the middle of a save, which is made again."""
    kills, given, front, step = CASES[case]
    (alone,) = fresh.run(1, train, tmp_path / "alone", {}, {}, "wrapper")
    assert alone.error is None and len(alone.result[0]) == STEPS, alone
    folder = tmp_path / "three"
    for rank, outcome in enumerate(fresh.run(3, train, folder, kills, given, front)):
        if rank in kills:
            assert outcome.exit_code == -signal.SIGKILL, outcome
            continue
        assert outcome.error is None and outcome.exit_code == 0, outcome
        losses, digest, survived = outcome.result
        assert (losses, digest) == alone.result[:2]
        words = rf"the loss of rank {next(iter(kills))} in step {step}, in \d+\.\d s, by 2 ranks"
        assert re.fullmatch(words, survived), survived
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, STEPS + 1)]
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4, 6]
    assert [row["eval_loss"] for row in rows if "eval_loss" in row] == [
        row["eval_loss"] for row in read_metrics(tmp_path / "alone" / "metrics.jsonl") if "eval_loss" in row
    ]
    names = [f"step-{number:08}" for number in (2, 4, 6)]
    assert sorted(each.name for each in folder.glob("*step-*") if not each.name.endswith(".token")) == names
    assert [each.problem for each in checkpoint.listing(folder, named="step-*")] == [""] * 3


KILLS = """
import multiprocessing, os, signal
from flatfsdp.trainer import Callback

class Lost(Callback):
    def on_step_begin(self, run, step):
        if step == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 5 and os.environ["RANK"] == "0":
            raise ValueError("out of luck")

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


def command(callback: str, folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(KILLS)
    (folder / "text.txt").write_text(TEXT)
    job = ["-m", "flatfsdp.train", *TINY, "--steps", "6", "--no-plot", "--no-progress", "--text", "text.txt"]
    return run_command(*job, "--callbacks", f"mine:{callback}", "--elastic", *given, folder=folder)


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
