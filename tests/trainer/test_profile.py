"""The trainer's trace: what may still be under way when it stops is not in it. (torch writes to freed memory then.)"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flatfsdp.trainer import CausalLM, Task, Trainer, TrainingArguments
from flatfsdp.trainer.demo.model import ByteTransformer
from tests.conftest import Run

pytestmark = pytest.mark.distributed


def samples() -> list[dict[str, Tensor]]:
    tokens = torch.arange(24 * 8).view(24, 8)
    return [{"input_ids": each, "labels": each.clone()} for each in tokens]


def trace(rank: int, world: int, output: Path) -> str:
    net = partial(ByteTransformer, width=16, layers=1, heads=2, context=8)
    training = TrainingArguments(
        steps=5, batch=2, device="cpu", progress=False, output=output, data_mode="dispatch", profile="2..3"
    )
    Trainer(Task(model=net, train_data=samples, objective=CausalLM()), training).train()
    return (output / f"trace-rank{rank}.json").read_text()


def test_collectives_that_are_waited_for_in_a_later_step_are_not_recorded(run: Run, tmp_path: Path) -> None:
    for text in run(2, trace, tmp_path):
        assert "flatfsdp::" in text and "gloo:scatter" not in text
