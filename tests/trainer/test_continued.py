"""Runs that continue under other conditions: longer, in another precision, on other ranks, in another folder."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from flatfsdp.errors import CheckpointError, ConfigValueError
from flatfsdp.trainer import CausalLM, FSDPArguments, Task, Trainer, TrainingArguments
from flatfsdp.trainer.callbacks import Callback
from flatfsdp.trainer.demo.model import ByteTransformer
from flatfsdp.trainer.run import StepReport
from tests.conftest import Run

pytestmark = pytest.mark.distributed

SAMPLES = 12


def make_model() -> nn.Module:
    return ByteTransformer(width=16, layers=2, heads=2, context=8)


def sentences() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(256, (SAMPLES, 8), generator=generator)
    return [{"input_ids": each, "labels": each} for each in tokens]


class Notes(Callback):
    """Learning rates by step; a state that begins empty."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        self.rates[report.step] = report.lr

    def state_dict(self) -> dict[str, Any]:
        return {str(step): rate for step, rate in self.rates.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rates = {int(step): rate for step, rate in state.items()}


def train(
    rank: int, world: int, output: Path, given: dict[str, Any], fsdp: dict[str, Any] | None = None, **task: Any
) -> dict[int, float] | str:
    """The learning rates, or why it was refused."""
    chosen = {"model": make_model, "train_data": sentences, "objective": CausalLM(), **task}
    arguments = TrainingArguments(
        **{"output": output, "epochs": 1, "batch": 1, "lr": 0.1, "optimizer": "sgd", "device": "cpu", **given}
    )
    notes = Notes()
    try:
        Trainer(Task(**chosen), arguments, FSDPArguments(**fsdp or {}), callbacks=[notes]).train()
    except (CheckpointError, ConfigValueError) as error:
        return str(error)
    return notes.rates


def cosine(step: int, steps: int) -> float:
    return 0.05 * (1 + math.cos(math.pi * (step - 1) / steps))


def test_a_longer_run_goes_on_with_the_rates_of_its_length_from_its_first_step(run: Run, tmp_path: Path) -> None:
    first, _ = run(2, train, tmp_path, {})
    assert first == pytest.approx({step: cosine(step, 6) for step in range(1, 7)})
    for found in run(2, train, tmp_path, {"epochs": 2, "resume": "latest"}):
        assert found == pytest.approx(first | {step: cosine(step, 12) for step in range(7, 13)})


def halving(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.5)


def train_noting_warnings(*args: Any) -> tuple[dict[int, float] | str, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(*args)
    return found, [str(each.message) for each in caught if str(each.message).startswith("lr: ")]


def test_a_scheduler_of_the_users_that_keeps_its_rates_is_reported(run: Run, tmp_path: Path) -> None:
    """One of the trainer's own follows the rates of the run."""
    given = {"scheduler": halving}
    run(2, train, tmp_path / "own", given)
    again = {**given, "epochs": 2, "resume": "latest", "lr": 0.3}
    (rates, texts), (same, silent) = run(2, train_noting_warnings, tmp_path / "own", again)
    assert rates == same == pytest.approx(dict.fromkeys(range(1, 7), 0.1) | dict.fromkeys(range(7, 13), 0.05))
    assert len(texts) == 1 and silent == []
    assert texts[0].startswith("lr: the learning rates 0.1 of the resumed run are kept, not 0.3 of this one")
    run(2, train, tmp_path / "ours", {"scheduler": "constant"})
    again = {"scheduler": "constant", "epochs": 2, "resume": "latest", "lr": 0.3}
    for rates, texts in run(2, train_noting_warnings, tmp_path / "ours", again):
        assert rates == pytest.approx(dict.fromkeys(range(1, 7), 0.1) | dict.fromkeys(range(7, 13), 0.3))
        assert texts == []


def test_gradients_in_few_bits_go_on_with_what_they_have_lost(run: Run, tmp_path: Path) -> None:
    fsdp = {"reduce_bits": 4, "reduce_error_feedback": True}
    given = {"scheduler": "constant", "steps": 6}
    run(2, train, tmp_path / "once", given, fsdp)
    run(2, train, tmp_path / "twice", {**given, "steps": 3}, fsdp)
    run(2, train, tmp_path / "twice", {**given, "resume": "latest"}, fsdp)
    once, twice = ((tmp_path / name / "step-00000006/model.safetensors").read_bytes() for name in ("once", "twice"))
    assert once == twice


def test_on_more_ranks_rates_are_of_the_steps_that_the_run_has(run: Run, tmp_path: Path) -> None:
    """The run keeps its two samples a step; three ranks would have begun with three."""
    given = {"epochs": 2, "save_every": 2, "keep_last": 9}
    whole, _ = run(2, train, tmp_path / "run", given)
    given = {**given, "resume": tmp_path / "run" / "step-00000002"}
    for found in run(3, train, tmp_path / "more", given):
        assert found == pytest.approx(whole)


@pytest.mark.parametrize(("before", "after"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_a_run_goes_on_in_another_precision(run: Run, tmp_path: Path, before: str, after: str) -> None:
    run(2, train, tmp_path, {"save_every": 3}, {"param_dtype": before})
    found, _ = run(2, train, tmp_path, {"epochs": 2, "resume": "latest"}, {"param_dtype": after})
    assert len(found) == 12


def test_a_folder_of_checkpoints_takes_no_run_from_elsewhere(run: Run, tmp_path: Path) -> None:
    """A job that is started again by its scheduler would start over each time, and remove its progress."""
    run(2, train, tmp_path / "before", {"epochs": 2})
    elsewhere = {"resume": tmp_path / "before" / "step-00000012", "epochs": 3}
    found, _ = run(2, train, tmp_path / "after", elsewhere)
    assert len(found) == 18
    for text in run(2, train, tmp_path / "after", elsewhere):
        assert "a run, whose last checkpoint is step-00000018" in text
        assert "resume='latest'" in text
    found, _ = run(2, train, tmp_path / "after", {"resume": tmp_path / "after" / "step-00000018", "epochs": 4})
    assert len(found) == 24


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(sentences())


def test_a_course_needs_an_end(run: Run, tmp_path: Path) -> None:
    (text,) = run(1, train, tmp_path, {"shuffle": False}, train_data=Stream())
    assert "scheduler: got 'cosine', but the dataset has no known length" in text
    constant = {"shuffle": False, "scheduler": "constant"}
    (text,) = run(1, train, tmp_path, {**constant, "warmup": 0.1}, train_data=Stream())
    assert "warmup: got 0.1, but the dataset has no known length" in text
    (found,) = run(1, train, tmp_path, constant, train_data=Stream())
    assert found == dict.fromkeys(range(1, 13), 0.1)


def test_data_that_fill_no_step_are_refused(run: Run, tmp_path: Path) -> None:
    for text in run(2, train, tmp_path, {"batch": 7, "drop_last": True}):
        assert text.startswith("drop_last: the data do not fill one step of 14 samples")


class Drawn(nn.Module):
    """Its weights are Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([random.random() for _ in range(6)]))

    def forward(self) -> Tensor:
        return self.weight


def weights(rank: int, world: int) -> Tensor:
    random.seed(rank)
    trainer = Trainer(Task(model=Drawn, train_data=sentences, objective=CausalLM()), TrainingArguments(device="cpu"))
    return trainer.model.state_dict()["weight"].clone()


def test_ranks_make_the_same_model_whatever_draws_its_weights(run: Run) -> None:
    first, second = run(2, weights)
    random.seed(0)
    assert first.tolist() == second.tolist() == pytest.approx([random.random() for _ in range(6)])


class Unwritable:
    """A tokenizer that cannot be saved."""

    def save_pretrained(self, folder: Path) -> None:
        raise OSError("no space left")


def export(rank: int, world: int, folder: Path) -> str:
    task = Task(model=make_model, train_data=sentences, objective=CausalLM(), tokenizer=Unwritable())
    with pytest.raises(CheckpointError) as error:
        Trainer(task, TrainingArguments(device="cpu")).export(folder)
    return str(error.value)


def test_all_ranks_know_of_an_export_that_failed(run: Run, tmp_path: Path) -> None:
    for text in run(2, export, tmp_path / "export"):
        failed = "rank 0: the function given as files= raised OSError: no space left"
        assert text == f"exporting to {tmp_path / 'export'}: {failed}"
    assert not list(tmp_path.iterdir())


class Vocabulary:
    """A tokenizer of two files, one in a folder of its own."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "more").mkdir()
        for name in ("vocabulary.txt", "more/merges.txt"):
            (folder / name).write_text("a b")


def export_again(rank: int, world: int, folder: Path, overwrite: bool) -> str:
    task = Task(model=make_model, train_data=sentences, objective=CausalLM(), tokenizer=Vocabulary())
    trainer = Trainer(task, TrainingArguments(device="cpu", seed=world))
    try:
        trainer.export(folder, overwrite=overwrite)
    except CheckpointError as error:
        return str(error)
    return "exported"


def test_an_export_takes_the_place_of_another_and_of_nothing_else(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    assert run(1, export_again, folder, False) == ["exported"]
    first = (folder / "model.safetensors").read_bytes()
    assert all("is complete already" in text for text in run(2, export_again, folder, False))
    assert (folder / "model.safetensors").read_bytes() == first
    assert run(2, export_again, folder, True) == ["exported"] * 2
    assert (folder / "model.safetensors").read_bytes() != first, "another seed"
    assert (folder / "more" / "merges.txt").is_file()
    (folder / "notes.txt").write_text("mine")
    assert all(
        "1 files that were not written by a save (notes.txt)" in text for text in run(2, export_again, folder, True)
    )
    run(2, train, tmp_path / "run", {"save_every": 6})
    for text in run(2, export_again, tmp_path / "run" / "step-00000006", True):
        assert "is a checkpoint, which holds more than weights. Export to another folder" in text
