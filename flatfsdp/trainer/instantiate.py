"""Makes the objects that a task's fields are, or name; functions get the options that they take."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.arguments import Task
from flatfsdp.trainer.hub.pretrained import PREFIX, Pretrained
from flatfsdp.trainer.hub.text_data import SOURCES, TextData
from flatfsdp.trainer.settings.references import check_all_taken, resolve, takes

_MADE = ("model", "train_data", "eval_data", "objective", "tokenizer")


def make(task: Task, name: str) -> Any:
    """The object that the field `name` of `task` is, names or makes.

    Text is resolved. A function (a method, a `functools.partial`, a class) is then called with those of `task.options`
    that it takes by name; any other value is the object itself, even if it is callable, like a module.

    Raises:
        ConfigValueError: as `resolve`; or the result is not a model. Exceptions of the function propagate.
    """
    found = named(task, name)
    if name == "tokenizer" and found is None and isinstance(model := named(task, "model"), Pretrained):
        return model.tokenizer
    if isinstance(found, Pretrained):
        return found.make()
    if isinstance(found, TextData):
        return found.make(make(task, "tokenizer"))
    if _is_function(found):
        found = found(**{option: value for option, value in task.options.items() if takes(found, option)})
    return _checked(found, task) if name == "model" else found


def _checked(model: Any, task: Task) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    accepted = "a torch.nn.Module, or a function that makes one"
    raise ConfigValueError(f"model: {task.model} gives a {type(model).__name__}. Accepted: {accepted}")


def collate_for(task: Task) -> Any:
    """The function that makes microbatches: the task's, that of text by name, or None for torch's."""
    data = named(task, "train_data")
    if task.collate is None and isinstance(data, TextData):
        return data.collate(make(task, "tokenizer"))
    return resolve(task.collate, argument="collate")


def check_options(task: Task) -> None:
    """Refuse options that no function of the task takes, and unknown names.

    Raises:
        ConfigValueError: with the first problem.
    """
    found = {name: named(task, name) for name in _MADE}
    functions = {name: each for name, each in found.items() if _is_function(each)}
    if isinstance(model := found["model"], Pretrained):
        _ = model.folder  # found, or downloaded, before anything is started
    elif "model" not in functions:
        _checked(model, task)
    check_all_taken(task.options, {f"{name}=": each for name, each in functions.items()}, argument="options")


def named(task: Task, name: str) -> Any:
    """The value of the field `name` of `task`, resolved: the object, or a function or named source that makes it."""
    value = getattr(task, name)
    if isinstance(value, str) and name == "model" and value.startswith(PREFIX):
        return Pretrained(value.removeprefix(PREFIX))
    if isinstance(value, str) and name.endswith("_data") and value.partition(":")[0] in SOURCES:
        return TextData(value)
    return resolve(value, argument=name)


def _is_function(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, (type, functools.partial))
