"""From the settings of a command line or a file to a task of things by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.arguments import Task
from flatfsdp.trainer.hub.pretrained import PREFIX, ModelOptions, Pretrained
from flatfsdp.trainer.hub.text_data import SOURCES, DataOptions, TextData
from flatfsdp.trainer.settings import Settings, flag_of


def with_options(task: Task, model: ModelOptions, data: DataOptions) -> Task:
    """`task`, in which names of models and of text stand with their options.

    Raises:
        ConfigValueError: options are given, and nothing by name has them.
    """
    changes: dict[str, Any] = {}
    if isinstance(task.model, str) and task.model.startswith(PREFIX):
        changes["model"] = Pretrained(task.model.removeprefix(PREFIX), **vars(model))
    elif flag := changed_flag(model):
        raise ConfigValueError(f"{flag} belongs to a model of transformers: --model {PREFIX}NAME")
    for field, split in (("train_data", data.train_split), ("eval_data", data.eval_split)):
        value = getattr(task, field)
        if isinstance(value, str) and value.partition(":")[0] in SOURCES:
            changes[field] = TextData(value, split=split, **vars(data))
    if not (changes.keys() & {"train_data", "eval_data"}) and (flag := changed_flag(data)):
        raise ConfigValueError(
            f"{flag} belongs to text by name: --train-data {' or '.join(f'{s}:...' for s in SOURCES)}"
        )
    return dataclasses.replace(task, **changes) if changes else task


def changed_flag(group: Settings) -> str:
    """The flag of the first field that has not its default; "" where there is none."""
    given, default = vars(group), vars(type(group)())
    return next((flag_of(name) for name in default if given[name] != default[name]), "")
