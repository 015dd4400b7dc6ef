"""From names to things: "package.module:name" to the object, and functions that take what options they know."""

from __future__ import annotations

import functools
import inspect
import os
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

from flatfsdp.errors import ConfigValueError, did_you_mean, refuse_value
from flatfsdp.trainer.arguments import Task
from flatfsdp.trainer.call_options import check_all_taken, takes
from flatfsdp.trainer.hub.pretrained import PREFIX, Pretrained
from flatfsdp.trainer.hub.text_data import SOURCES, TextData
from flatfsdp.trainer.settings import REFERENCE

_MADE = ("model", "train_data", "eval_data", "objective", "tokenizer")


def make(task: Task, name: str) -> Any:
    """The object that the field `name` of `task` is, names or makes.

    Text is resolved. A function (a method, a `functools.partial`, a class) is then called with those of `task.options`
    that it takes by name; anything else is the object itself, also if it can be called, as modules can.

    Raises:
        ConfigValueError: as `resolve`. What the function raises comes as it is.
    """
    found = resolve(getattr(task, name), argument=name)
    if name == "tokenizer" and found is None:
        model = resolve(task.model, argument="model")
        return model.tokenizer if isinstance(model, Pretrained) else None
    if isinstance(found, Pretrained):
        return found.make()
    if isinstance(found, TextData):
        return found.make(make(task, "tokenizer"))
    if not _is_function(found):
        return found
    return found(**{name: value for name, value in task.options.items() if takes(found, name)})


def collate_for(task: Task) -> Any:
    """What makes microbatches: the task's, that of text by name, or None for torch's."""
    data = resolve(task.train_data, argument="train_data")
    if task.collate is None and isinstance(data, TextData):
        return data.collate(make(task, "tokenizer"))
    return resolve(task.collate, argument="collate")


def check_options(task: Task) -> None:
    """Refuse options that no function of the task takes, and names that there are not.

    Raises:
        ConfigValueError: with the first of them.
    """
    found = {name: resolve(getattr(task, name), argument=name) for name in _MADE}
    if isinstance(model := found["model"], Pretrained):
        _ = model.folder  # looked for, and downloaded, before anything is started
    functions = {name: each for name, each in found.items() if _is_function(each)}
    check_all_taken(task.options, functions, argument="options")


def resolve(reference: Any, *, argument: str) -> Any:
    """The object that a text of the form `REFERENCE` names; what is no text is returned as it is.

    Modules of the current directory can be imported, as by `python -m`.

    Raises:
        ConfigValueError: there is no such module or name, with the nearest one; the import failed, with the exception
            as its cause. Begins with `argument`.
    """
    if not isinstance(reference, str):
        return reference
    if argument == "model" and reference.startswith(PREFIX):
        return Pretrained(reference.removeprefix(PREFIX))
    if argument.endswith("_data") and reference.partition(":")[0] in SOURCES:
        return TextData(reference)
    if not REFERENCE.fullmatch(reference):
        refuse_value(argument, reference, "'package.module:name'")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(reference)
    except ModuleNotFoundError as error:
        name = error.name or ""
        if not re.match(rf"{re.escape(name)}\b", reference):  # a module that the named one imports
            raise ConfigValueError(f"{argument}: importing {reference!r} failed: {error}") from error
        here = [path.stem for path in Path.cwd().glob("*.py")] if "." not in name else []
        hint = f"looked in {os.getcwd()} and where Python looks. {did_you_mean(name, here)}"
        raise ConfigValueError(f"{argument}: there is no module {name!r}; {hint}".rstrip()) from None
    except Exception as error:
        trace = error.__traceback__
        if isinstance(error, AttributeError) and trace and trace.tb_next and not trace.tb_next.tb_next:
            # Of the module or the class, not of code that the import runs.
            name, owner = error.name or "", getattr(error.obj, "__name__", "the object")
            there = [each for each in dir(error.obj) if each.isidentifier() and not each.startswith("_")]
            hint = did_you_mean(name, there) or f"There are {', '.join(there) or 'no public names'}."
            raise ConfigValueError(f"{argument}: {owner} has no {name!r}. {hint}") from None
        why = f"{type(error).__name__}: {error}"
        raise ConfigValueError(f"{argument}: importing {reference!r} failed: {why}") from error


def _is_function(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, (type, functools.partial))
