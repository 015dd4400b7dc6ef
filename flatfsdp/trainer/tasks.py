"""The things that a task names."""

from __future__ import annotations

from typing import Any

from flatfsdp.trainer.arguments import Task
from flatfsdp.trainer.settings.factories import check_all_taken, is_function, made, resolve

__all__ = ["check_options", "make"]

_MADE = ("model", "train_data", "eval_data", "objective", "tokenizer")


def make(task: Task, name: str) -> Any:
    """What the field `name` of `task` is, names or makes; functions are given those of `task.options` that they take.

    Raises:
        ConfigValueError: it cannot be imported. What a function raises is raised.
    """
    return made(getattr(task, name), task.options, argument=name)


def check_options(task: Task) -> None:
    """Refuse options that no function of the task takes, and names that there are not.

    Raises:
        ConfigValueError: with the first of them.
    """
    found = {name: resolve(getattr(task, name), argument=name) for name in _MADE}
    check_all_taken(task.options, {name: each for name, each in found.items() if is_function(each)}, argument="options")
