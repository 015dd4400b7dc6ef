"""A rank of a trainer that fails alone in the middle of a step, and lives on."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.engine.watchdog.regions import current_watch
from flatfsdp.engine.watchdog.status_report import ProcessIdentity
from flatfsdp.trainer import CausalLM, Task, Trainer, TrainingArguments
from tests.distributed.trainer.test_failures import FAILING, LUCK, make_model, sentences
from tests.harness import fresh

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
