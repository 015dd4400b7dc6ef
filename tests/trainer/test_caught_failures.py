"""Failures of a trainer on one rank, in a program that catches them: every rank raises, none waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.trainer import CausalLM, Task, Trainer, TrainingArguments
from flatfsdp.trainer.callbacks import Callback
from flatfsdp.trainer.demo.model import ByteTransformer
from tests.conftest import Run

pytestmark = pytest.mark.distributed

FAILING = 1  # rank
LUCK = "ValueError: out of luck"


def make_model() -> nn.Module:
    return ByteTransformer(width=8, layers=1, heads=2, context=8)


def sentences(count: int = 12) -> list[dict[str, Tensor]]:
    tokens = torch.randint(256, (count, 8), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": each, "labels": each} for each in tokens]


class Fails(Callback):
    """At one event, from its `at`-th time on, on one rank."""

    def __init__(self, event: str, at: int = 1) -> None:
        self._event, self._left = event, at

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda trainer, *values: self.happen(name, trainer)
        return super().__getattribute__(name)

    def happen(self, event: str, trainer: Trainer) -> None:
        if event == self._event and trainer.world.rank == FAILING:
            self._left -= 1
            if self._left <= 0:
                raise ValueError("out of luck")


class FailingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if torch.distributed.get_rank() == FAILING and self.param_groups[0]["lr"] < 0.06:
            raise ValueError("out of luck")


class FailingLR(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[Any]:
        if torch.distributed.get_rank() == FAILING and self.last_epoch == 3:
            raise ValueError("out of luck")
        return list(self.base_lrs)


def failing_scheduler(optimizer: Any, steps: int) -> FailingLR:
    return FailingLR(optimizer)


def train(rank: int, world: int, output: Path, given: dict[str, Any], callbacks: list[Callback]) -> tuple[str, int]:
    """The error that this rank raises, and the steps before it; a second run is not affected."""
    task = Task(model=make_model, train_data=sentences, eval_data=sentences(2), objective=CausalLM())
    common = {"epochs": 1, "batch": 1, "lr": 0.1, "optimizer": "sgd", "device": "cpu", "eval_every": 4, "save_every": 5}
    trainer = Trainer(task, TrainingArguments(**{**common, "output": output / "one", **given}), callbacks=callbacks)
    try:
        trainer.train()
        text = ""
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    plain = {"optimizer": "sgd", "scheduler": "cosine", "output": output / "other"}
    assert Trainer(task, TrainingArguments(**{**common, **given, **plain})).train().steps == 12 // world
    return text, trainer.progress.step


EVENTS = {
    "on_begin": ("on_begin", 1, 0, "sharded"),
    "the first step": ("on_step", 1, 2, "sharded"),
    "the first step, rank 0 reads": ("on_step", 1, 2, "dispatch"),
    "a step that is evaluated": ("on_step", 4, 4, "sharded"),
    "the last step": ("on_step", 6, 6, "sharded"),
    "the last step, rank 0 reads": ("on_step", 6, 6, "dispatch"),
    "on_evaluation": ("on_evaluation", 1, 4, "sharded"),
    "on_save": ("on_save", 1, 5, "sharded"),
    "on_end": ("on_end", 1, 6, "dispatch"),
}


@pytest.mark.parametrize(("event", "at", "steps", "mode"), EVENTS.values(), ids=EVENTS)
def test_a_callback_fails_on_one_rank(pool2: Run, tmp_path: Path, event: str, at: int, steps: int, mode: str) -> None:
    found = pool2(train, tmp_path, {"data_mode": mode}, [Fails(event, at)])
    message = f"rank 1 failed in Fails.{event} with {LUCK}. The remaining ranks cannot continue"
    assert found == [(f"AgreementError: {message}", steps), (LUCK, steps)]


@pytest.mark.parametrize(
    "given", [{"optimizer": FailingSGD}, {"scheduler": failing_scheduler}], ids=["optimizer", "scheduler"]
)
def test_a_step_of_the_optimizer_fails_on_one_rank(pool2: Run, tmp_path: Path, given: dict[str, Any]) -> None:
    (other, steps), (own, same) = pool2(train, tmp_path, given, [])
    assert (own, steps) == (LUCK, same)
    place = "the step of its optimizer and scheduler"
    assert other == f"AgreementError: rank 1 failed in {place} with {LUCK}. The remaining ranks cannot continue"
