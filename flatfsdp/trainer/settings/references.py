"""Resolves "package.module:name" to the object, and checks the options that a function takes by name."""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flatfsdp.errors import ConfigValueError, did_you_mean, refuse_value
from flatfsdp.trainer.settings import nearest

# "package.module:name", with attributes of the name, or "package.module.name".
REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def resolve(reference: Any, *, argument: str) -> Any:
    """The object that a text of the form `REFERENCE` names; other values are returned unchanged.

    Modules of the current directory can be imported, as by `python -m`.

    Raises:
        ConfigValueError: the module or name does not exist, with the nearest one; or the import failed, with the
            exception as its cause. Begins with `argument`.
    """
    if not isinstance(reference, str):
        return reference
    if not REFERENCE.fullmatch(reference):
        refuse_value(argument, reference, "'package.module:name'")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(reference)
    except Exception as error:
        name, trace, why = getattr(error, "name", None) or "", error.__traceback__, f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and re.match(rf"{re.escape(name)}\b", reference):  # the module itself
            here = [path.stem for path in Path.cwd().glob("*.py")] if "." not in name else []
            hint = f"looked in {os.getcwd()} and where Python looks. {did_you_mean(name, here)}"
            raise ConfigValueError(f"{argument}: there is no module {name!r}; {hint}".rstrip()) from None
        if isinstance(error, AttributeError) and trace and trace.tb_next and not trace.tb_next.tb_next:
            # Raised for the module or class, not by code that the import runs.
            owner = getattr(error.obj, "__name__", "the object")
            there = [each for each in dir(error.obj) if each.isidentifier() and not each.startswith("_")]
            hint = did_you_mean(name, there) or f"There are {', '.join(there) or 'no public names'}."
            raise ConfigValueError(f"{argument}: {owner} has no {name!r}. {hint}") from None
        raise ConfigValueError(f"{argument}: failed to import {reference!r}: {why}") from error


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` can be given an argument `name` by its name; True where that is unknown."""
    try:
        inspect.signature(function).bind_partial(**{name: None})
    except TypeError:
        return False
    except ValueError:  # a function of an extension has no signature
        return True
    return True


def check_all_taken(options: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]], *, argument: str) -> None:
    """Refuse options that none of `functions` (by their names in messages) takes.

    Raises:
        ConfigValueError: the first such option, with the nearest name.
    """
    for option in options:
        if not any(takes(function, option) for function in functions.values()):
            known = {name: None for function in functions.values() for name in inspect.signature(function).parameters}
            who = " and ".join(functions)
            who = f"{who} take{'s' * (len(functions) == 1)} no option" if who else "nothing takes an option"
            raise ConfigValueError(f"{argument}: {who} {option!r}. {nearest(option, known)}")
