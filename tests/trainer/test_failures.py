"""A rank of a trainer that fails alone in the middle of a step, or is killed, and what the others print."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.engine.base.processes import ProcessIdentity
from flatfsdp.engine.watchdog.regions import current_watch
from flatfsdp.trainer import CausalLM, Task, Trainer, TrainingArguments
from tests.harness import commands, fresh
from tests.trainer.test_caught_failures import FAILING, LUCK, make_model, sentences
from tests.trainer.test_train import TEXT, TINY, environment
from tests.trainer.test_train import train as run_command

pytestmark = pytest.mark.process

LIMIT = 120.0  # seconds for all ranks to end; on idle cores it takes 10


class Unlucky(CausalLM):
    """Fails in its third loss, before its forward, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._calls += 1
        if self._calls == 3 and dist.get_rank() == FAILING:
            raise ValueError("out of luck")
        return super().loss(model, batch)


def train(rank: int, world: int) -> str:
    """The error that this rank catches; the rank that failed stays until the other has ended."""
    dist.init_process_group("gloo")
    task = Task(model=make_model, train_data=sentences, objective=Unlucky())
    trainer = Trainer(task, TrainingArguments(epochs=1, batch=1, device="cpu", save_at_end=False))
    try:
        trainer.train()
    except Exception as error:
        other = ProcessIdentity(*json.loads(current_watch().store.read("here/0") or "[]"))
        deadline = time.monotonic() + LIMIT / 2
        while rank == FAILING and not other.is_gone() and time.monotonic() < deadline:
            time.sleep(0.1)
        return f"{type(error).__name__}: {error}"
    return "trained"


def test_the_others_learn_of_an_objective_that_failed() -> None:
    """They wait in the middle of the model: a process that nothing wakes is ended."""
    other, failing = fresh.run(2, train, timeout=LIMIT)
    assert failing.result == LUCK
    text = f"AgreementError: rank 1 failed in training with {LUCK}. The remaining ranks cannot continue"
    assert re.search(rf"^\[flatfsdp, rank 0\] {re.escape(text)}$", other.output, re.MULTILINE), other
    assert other.result == text or other.exit_code == 1, other


CALLBACKS = """
import os, signal
from flatfsdp.trainer import Callback

class Fails(Callback):
    def on_step(self, run, report):
        if report.step == 3 and run.world.rank >= self.first:
            raise ValueError("out of luck")

class One(Fails):
    first = 1

class All(Fails):
    first = 0

class Killed(Callback):
    # In the middle of a backward.
    def on_begin(self, run):
        steps = []

        def hook(*unused):
            steps.append(1)
            if len(steps) == 3 and run.world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        leaves = [each for each in run.model.modules() if not list(each.children())]
        leaves[-2].register_full_backward_pre_hook(hook)
"""
LOST = r"^\[flatfsdp, rank 0\] LostRankError: rank 1 was killed, or crashed: process \d+ on .* is gone\. The remaining"


def command(callback: str, folder: Path, *, launcher: bool) -> subprocess.CompletedProcess[str]:
    """The trainer's command with one of `CALLBACKS`, on two ranks that it spawns or that torchrun has started."""
    (folder / "mine.py").write_text(CALLBACKS)
    (folder / "text.txt").write_text(TEXT)
    job = ["-m", "flatfsdp.train", *TINY, "--steps", "20", "--no-plot", "--no-progress", "--callbacks", callback]
    job += ["--text", "text.txt"]
    if launcher:  # looks so rarely that it ends no rank before it has printed its own line
        return commands.torchrun(2, "--monitor-interval=3", *job, folder=folder, environment=environment())
    return run_command(*job, "--ranks", "2", folder=folder)


@pytest.mark.parametrize("launcher", [False, True], ids=["spawned", "torchrun"])
def test_the_rank_that_was_killed_is_named_in_one_line(tmp_path: Path, launcher: bool) -> None:
    done = command("mine:Killed", tmp_path, launcher=launcher)
    assert done.returncode == 1
    assert len(re.findall(LOST, done.stderr, re.MULTILINE)) == done.stderr.count("LostRankError") == 1, done.stderr
    for misleading in ("a backward failed", "stopping after this step", "flatfsdp/train.py"):  # the last: a traceback
        assert misleading not in done.stderr, done.stderr
    if not launcher:
        assert re.search(r"^flatfsdp\.train: rank 1 died: process 1 terminated with signal SIGKILL$", done.stderr, re.M)


@pytest.mark.parametrize("launcher", [False, True], ids=["spawned", "torchrun"])
@pytest.mark.parametrize("callback", ["One", "All"])
def test_an_exception_of_a_callback_is_printed_once_a_rank(tmp_path: Path, callback: str, launcher: bool) -> None:
    done = command(f"mine:{callback}", tmp_path, launcher=launcher)
    assert done.returncode == 1
    raised = len(re.findall(r"^(?:\[rank\d\]: )?ValueError: out of luck$", done.stderr, re.MULTILINE))
    failed = r"(?:AgreementError: rank \d failed in \w+\.on_step|LostRankError: rank \d ended)"
    named = len(re.findall(rf"{failed} with ValueError: out of luck", done.stderr))
    # torchrun may end a rank of two that fail alike before its own traceback.
    assert raised >= 1 and raised + named == (2 if launcher else 1), done.stderr
