"""The trainer with `deterministic_sums`: the same losses, norms and parameters on any number of ranks, bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullStateDictConfig, FullyShardedDataParallel
from flatfsdp.errors import AuditError, ConfigValueError
from flatfsdp.trainer import CausalLM, FSDPArguments, Task, Trainer, TrainingArguments
from flatfsdp.trainer.callbacks import Callback
from flatfsdp.trainer.demo.model import ByteTransformer
from flatfsdp.trainer.run import StepReport
from tests.conftest import Run
from tests.harness import pool

pytestmark = pytest.mark.distributed

SAMPLES = 22  # the last step of an epoch is smaller


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = ByteTransformer(width=16, layers=2, heads=2, context=8)
        for parameter in self.net.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.dropout(self.net(input_ids))


def sentences() -> list[dict[str, Tensor]]:
    """Samples with different numbers of targets."""
    generator = torch.Generator().manual_seed(7)
    samples = []
    for number in range(SAMPLES):
        tokens = torch.randint(256, (8,), generator=generator)
        labels = tokens.clone()
        labels[2 + number % 6 :] = -100
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


class Record(Callback):
    """The losses and norms of the steps, and the evaluations."""

    def __init__(self) -> None:
        self.numbers: list[Any] = []

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        self.numbers.append((report.loss, report.grad_norm))

    def on_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self.numbers.append(dict(metrics))


def train(rank: int, world: int, output: Path, given: dict[str, Any], fsdp: dict[str, Any]) -> tuple[list[Any], str]:
    """The numbers of a run, and a hash of its parameters."""
    record = Record()
    chosen: dict[str, Any] = {
        "epochs": 2, "batch": 2, "global_batch": 9, "lr": 0.05, "device": "cpu", "clip": 0.5, "eval_every": 2,
        "progress": False, "output": output, "scheduler": "constant",
    }  # fmt: skip
    task = Task(model=Dropping, train_data=sentences, eval_data=sentences, objective=CausalLM())
    trainer = Trainer(
        task, TrainingArguments(**chosen | given), FSDPArguments(deterministic_sums=True, **fsdp), callbacks=[record]
    )
    trainer.train()
    made = hashlib.sha256()
    with FullyShardedDataParallel.state_dict_type(trainer.model, "FULL", FullStateDictConfig()):
        for value in trainer.model.state_dict().values():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            made.update(whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return record.numbers, made.hexdigest()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], str]:
    """The numbers and the hash of one rank."""
    (found,) = pool.run(1, train, tmp_path_factory.mktemp("alone") / "run", {}, {})
    assert len(found[0]) > 5
    result: tuple[list[Any], str] = found
    return result


@pytest.mark.parametrize("data_mode", ["sharded", "dispatch"])
def test_any_number_of_ranks(run: Run, tmp_path: Path, data_mode: str, expected: tuple[list[Any], str]) -> None:
    for world in (2, 3, 4):
        assert run(world, train, tmp_path / str(world), {"data_mode": data_mode}, {}) == [expected] * world


def test_fully_shard(run: Run, tmp_path: Path, expected: tuple[list[Any], str]) -> None:
    assert run(2, train, tmp_path / "2", {}, {"front": "fully_shard"}) == [expected] * 2


def test_resumed_on_other_ranks(run: Run, tmp_path: Path, expected: tuple[list[Any], str]) -> None:
    run(3, train, tmp_path / "parts", {"steps": 2}, {})
    for numbers, found in run(2, train, tmp_path / "parts", {"resume": "latest"}, {}):
        assert found == expected[1] and numbers == expected[0][-len(numbers) :]


@pytest.mark.parametrize("data_mode", ["sharded", "dispatch"])
def test_audited(run: Run, tmp_path: Path, data_mode: str, expected: tuple[list[Any], str]) -> None:
    """An audit changes nothing, and raises no alarm: each rank reads the samples of others."""
    for world, optimizer in ((1, "adamw"), (3, "adamw")):
        given = {"audit_every": 1, "data_mode": data_mode, "optimizer": optimizer, "save_every": 2}
        assert run(world, train, tmp_path / f"audited {world}", given, {}) == [expected] * world


class Flip(Callback):
    """Flips a bit of a parameter of rank 1 after the second step."""

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        if step == 3 and trainer.world.rank == 1:
            parameter = next(each for each in trainer.model.parameters() if each.numel())
            parameter.detach().view(-1).view(torch.uint8).numpy()[3] ^= 4


def flipped(rank: int, world: int, output: Path) -> str:
    task = Task(model=Dropping, train_data=sentences, objective=CausalLM())
    training = TrainingArguments(
        epochs=2, batch=2, global_batch=9, device="cpu", progress=False, output=output, audit_every=2
    )
    trainer = Trainer(task, training, FSDPArguments(deterministic_sums=True), callbacks=[Flip()])
    with pytest.raises(AuditError) as caught:
        trainer.train()
    return str(caught.value)


def test_a_flipped_bit_is_named(run: Run, tmp_path: Path) -> None:
    for message in run(2, flipped, tmp_path):
        assert message.startswith("step 3: memory has changed since the last step") and ": rank 1: parameter" in message


def stream() -> Iterator[dict[str, Tensor]]:
    yield from sentences()


def refused(rank: int, world: int, given: dict[str, Any], fsdp: dict[str, Any], data: Any) -> str:
    task = Task(model=Dropping, train_data=data, objective=CausalLM())
    with pytest.raises(ConfigValueError) as caught:
        Trainer(task, TrainingArguments(device="cpu", **given), FSDPArguments(**fsdp))
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "fsdp", "data", "words"),
    [
        ({}, {"deterministic_sums": True}, sentences, "global_batch"),
        ({"audit_every": 2}, {}, sentences, "it needs deterministic_sums"),
        (
            {"audit_every": 2, "global_batch": 4, "optimizer_in_backward": True},
            {"deterministic_sums": True}, sentences, "no optimizer_in_backward",
        ),
        ({"audit_every": 2, "global_batch": 4, "epochs": 1}, {"deterministic_sums": True}, stream, "iterable dataset"),
    ],
    ids=["no global batch", "no deterministic sums", "in backward", "stream"],
)  # fmt: skip
def test_refused(run: Run, given: dict[str, Any], fsdp: dict[str, Any], data: Any, words: str) -> None:
    for message in run(2, refused, given, fsdp, data):
        assert words in message
