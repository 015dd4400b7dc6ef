"""Builds the task of a command line or a settings file from objects by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.arguments import Task
from flatfsdp.trainer.hub.pretrained import PREFIX, ModelOptions, Pretrained
from flatfsdp.trainer.hub.text_data import SOURCES, DataOptions, TextData
from flatfsdp.trainer.settings import Settings
from flatfsdp.trainer.settings.command_line import flag_of


def with_options(task: Task, model: ModelOptions, data: DataOptions) -> Task:
    """`task`, with the options added to the models and texts that it names.

    Raises:
        ConfigValueError: options are given, and no named object takes them.
    """
    changes: dict[str, Any] = {}
    if isinstance(task.model, str) and task.model.startswith(PREFIX):
        changes["model"] = Pretrained(task.model.removeprefix(PREFIX), **vars(model))
    elif flag := changed_flag(model):
        raise ConfigValueError(f"{flag} applies only to a model of transformers: --model {PREFIX}NAME")
    for field, split in (("train_data", data.train_split), ("eval_data", data.eval_split)):
        value = getattr(task, field)
        if isinstance(value, str) and value.partition(":")[0] in SOURCES:
            changes[field] = TextData(value, split=split, **vars(data))
    texts = [each for field, each in changes.items() if field != "model"]
    for name in ("train_split", "eval_split"):
        if texts and not any(each.name.startswith(PREFIX) for each in texts) and flag_of(name) in changed_flags(data):
            raise ConfigValueError(f"{flag_of(name)} applies only to a dataset: {PREFIX}NAME")
    if not texts and (flag := changed_flag(data)):
        raise ConfigValueError(
            f"{flag} applies only to text given by name: --train-data {' or '.join(f'{s}:...' for s in SOURCES)}"
        )
    return dataclasses.replace(task, **changes) if changes else task


def changed_flag(group: Settings) -> str:
    """The flag of the first field that differs from its default; "" where there is none."""
    return next(iter(changed_flags(group)), "")


def changed_flags(group: Settings) -> list[str]:
    """The flags of the fields that differ from their defaults."""
    given, default = vars(group), vars(type(group)())
    return [flag_of(name) for name in default if given[name] != default[name]]
