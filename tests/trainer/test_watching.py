"""Callbacks by name, settings that start the same run again, the cost of a token."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import flatfsdp.trainer
from flatfsdp.errors import ConfigTypeError, ConfigValueError
from flatfsdp.trainer.arguments import FSDPArguments, Task, TrainingArguments
from flatfsdp.trainer.callbacks import Callback, EarlyStop, LossPlot
from flatfsdp.trainer.hub.by_name import with_options
from flatfsdp.trainer.hub.pretrained import ModelOptions
from flatfsdp.trainer.hub.text_data import DataOptions
from flatfsdp.trainer.settings.command_line import Parser
from flatfsdp.trainer.utilization import flops_per_token, peak_tflops
from flatfsdp.trainer.watching.configuration import CONFIGURATION, Configuration
from flatfsdp.trainer.watching.named import callbacks_of, check_callbacks
from flatfsdp.trainer.watching.profile import Profile
from flatfsdp.trainer.watching.trackers import TensorBoard, WeightsAndBiases

pytestmark = pytest.mark.unit


def kinds(**given: Any) -> list[type]:
    return [type(each) for each in callbacks_of(TrainingArguments(**given))]


def test_callbacks_come_from_their_names() -> None:
    names = ["tensorboard", "wandb:mode=offline", "loss_plot", "flatfsdp.trainer.callbacks:EarlyStop:patience=4"]
    assert kinds(callbacks=names) == [TensorBoard, WeightsAndBiases, LossPlot, EarlyStop]
    assert kinds(early_stop=2, eval_every=1, profile="1..2") == [EarlyStop, Profile]


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("early_stop:patient=3", ConfigValueError, "takes no option 'patient'. Did you mean 'patience'"),
        ("wandb:mode=often", ConfigValueError, "got mode='often'"),
        ("json:loads", ConfigValueError, "rejects {}"),
        ("collections:OrderedDict", ConfigTypeError, "returned a OrderedDict. Accepted: a Callback."),
        ("flatfsdp.nothing:Here", ConfigValueError, "there is no module"),
        ("tensorbord", ConfigValueError, "callbacks: got 'tensorbord'. Did you mean 'tensorboard'"),
    ],
)
def test_callbacks_that_there_are_not(name: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        kinds(callbacks=[name])


def test_a_library_that_is_missing_is_named_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigValueError, match="wandb: wandb is required but not installed: pip install wandb"):
        check_callbacks(TrainingArguments(callbacks=["wandb:mode=offline"]))


def test_the_settings_of_a_run_start_it_again(tmp_path: Path) -> None:
    groups = {
        "training": TrainingArguments(
            output=tmp_path, steps=3, callbacks="wandb:project=p", profile="2..3", optimizer_options={"betas": [0.9]}
        ),
        "fsdp": FSDPArguments(bf16=True, units=("a", "B"), backward_prefetch=None, strategy="hybrid_shard", replicas=2),
    }  # fmt: skip
    trainer: Any = SimpleNamespace(
        world=SimpleNamespace(leads=True, size=3), output=tmp_path, written={}, begins=True, aside=None,
        training=groups["training"], loader=SimpleNamespace(global_batch=24),
    )  # fmt: skip
    Configuration(groups).on_begin(trainer)
    path = tmp_path / CONFIGURATION
    assert trainer.written == {"settings": path}
    assert "lr" not in json.loads(path.read_text())["training"]  # a default
    empty = {"training": TrainingArguments(), "fsdp": FSDPArguments()}
    assert Parser("p", groups=empty).read(["--config", str(path)]) == groups

    trainer.loader.global_batch = 16  # as 2 ranks began, and these 3 resume
    Configuration(groups).on_begin(trainer)
    kept = replace(groups["training"], global_batch=16)
    assert Parser("p", groups=empty).read(["--config", str(path)]) == groups | {"training": kept}


def test_adapters_and_text_on_the_command_line(tmp_path: Path) -> None:
    groups = {"model": ModelOptions(), "data": DataOptions()}
    given = Parser("p", groups=groups).read(["--lora", "rank=4,targets=q_proj,v_proj", "alpha=8", "--column", "body"])
    assert given["model"].lora == {"rank": 4, "targets": ["q_proj", "v_proj"], "alpha": 8}
    (file := tmp_path / "run.json").write_text('{"model": {"lora": ["rank=4", "alpha=2"]}}')
    assert Parser("p", groups=groups).read(["--config", str(file), "--lora", "alpha=8"])["model"].lora["alpha"] == 8
    task = Task(model="hf:some/name", train_data="jsonl:a", eval_data="hf:b:c")
    made = with_options(task, given["model"], given["data"])
    assert (made.model.name, made.model.options) == ("some/name", given["model"])
    assert [(each.name, each.split, each.options.column) for each in (made.train_data, made.eval_data)] == [
        ("jsonl:a", "train", "body"), ("hf:b:c", "validation", "body"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("task", "model", "data", "text"),
    [
        (("a:b", "a:b"), {"from_scratch": True}, {}, "--from-scratch applies only to a model of transformers"),
        (("a:b", "a:b"), {}, {"column": "body"}, "--column applies only to text given by name"),
        (("a:b", "jsonl:a"), {}, {"train_split": "x"}, "--train-split applies only to a dataset"),
    ],
)
def test_options_that_nothing_takes(task: Any, model: Any, data: Any, text: str) -> None:
    with pytest.raises(ConfigValueError, match=text):
        with_options(Task(*task), ModelOptions(**model), DataOptions(**data))


def test_frozen_parameters_have_no_gradients_to_compute() -> None:
    model = nn.Linear(4, 3)
    assert flops_per_token(model.parameters()) == 6 * 15
    model.weight.requires_grad_(False)
    assert flops_per_token(model.parameters()) == 4 * 12 + 6 * 3
    assert peak_tflops(torch.device("cpu"), None) is None
    assert peak_tflops(torch.device("cpu"), 2.5) == 2.5


@pytest.mark.parametrize(
    ("hook", "meant"),
    [
        ("on_step_end", "on_step"),
        ("on_train_begin", "on_begin"),
        ("on_evalution", "on_evaluation"),
        ("on_xyz", ""),
    ],
)
def test_a_method_that_no_hook_calls_is_refused_with_the_nearest_hook(hook: str, meant: str) -> None:
    with pytest.raises(ConfigValueError) as raised:
        type("Mine", (Callback,), {hook: lambda self, trainer: None})
    words = str(raised.value)
    assert words.startswith(f"Mine.{hook}: callbacks have no such hook")
    assert (f"called. Did you mean {meant!r}? Hooks: on_begin, " if meant else "called. Hooks: on_begin, ") in words
    mixin = type("Mixin", (), {hook: lambda self: None})
    with pytest.raises(ConfigValueError, match=hook):
        type("Mixed", (mixin, Callback), {})
    type("Fine", (Callback,), {"on_step": lambda self, trainer, report: None, "once": None, "on_what": "a value"})


def test_what_callbacks_are_made_of_is_public() -> None:
    assert {"Callback", "Run", "StepReport", "TrainingResult"} <= set(flatfsdp.trainer.__all__)
    assert flatfsdp.trainer.Callback is Callback
    assert all(getattr(flatfsdp.trainer, name) for name in flatfsdp.trainer.__all__)
