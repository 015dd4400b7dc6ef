"""Objects by name: "package.module:name" to the thing itself, and functions that take what options they know."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from flatfsdp.errors import ConfigValueError, did_you_mean, refuse_value
from flatfsdp.trainer.settings.kinds import REFERENCE

__all__ = ["call_with", "check_all_taken", "is_function", "made", "resolve", "takes"]


def resolve(reference: Any, *, argument: str) -> Any:
    """The object that "package.module:name" names, or "package.module.name"; what is no text is returned as it is.

    `name` may have attributes (`Model.from_config`). Modules of the current directory can be imported, as by
    `python -m`.

    Args:
        reference: the text, or the object.
        argument: what messages begin with.

    Raises:
        ConfigValueError: there is no such module or name, with the nearest one; the import failed, with the exception
            as its cause.
    """
    if not isinstance(reference, str):
        return reference
    if not REFERENCE.fullmatch(reference):
        refuse_value(argument, reference, "'package.module:name'")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    module_name, colon, attributes = reference.partition(":")
    if colon:
        return _inside(_imported(module_name, argument=argument), attributes, argument=argument)
    # Of "a.b.C.make" the module is the longest beginning that is one.
    parts = reference.split(".")
    for length in range(len(parts) - 1, 1, -1):
        if _is_module(".".join(parts[:length])):
            break
    else:
        length = 1
    return _inside(_imported(".".join(parts[:length]), argument=argument), ".".join(parts[length:]), argument=argument)


def made(reference: Any, options: Mapping[str, Any], *, argument: str) -> Any:
    """The object that a setting is, names or makes.

    Text is resolved. A function (a method, a `functools.partial`, a class) is then called with those of `options` that
    it takes; anything else is the object itself, also if it can be called, as modules can.

    Raises:
        ConfigValueError: as `resolve`. What the function raises comes as it is.
    """
    found = resolve(reference, argument=argument)
    return call_with(found, options) if is_function(found) else found


def is_function(value: Any) -> bool:
    """Whether `value` is there to be called: a function, a method, a `functools.partial` or a class."""
    return inspect.isroutine(value) or isinstance(value, (type, functools.partial))


def call_with(function: Callable[..., Any], options: Mapping[str, Any], *given: Any) -> Any:
    """`function(*given, **options)`, of `options` with those that it takes by name."""
    return function(*given, **{name: value for name, value in options.items() if takes(function, name)})


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` can be given an argument `name` by its name; True where that cannot be known."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a function of an extension
        return True
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if name in parameters:
        return parameters[name].kind in by_name
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def check_all_taken(options: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]], *, argument: str) -> None:
    """Refuse options that none of `functions`, by what they are called, takes.

    Raises:
        ConfigValueError: the first such option, with the nearest name.
    """
    for option in options:
        if not any(takes(function, option) for function in functions.values()):
            known = {name: None for function in functions.values() for name in inspect.signature(function).parameters}
            hint = did_you_mean(option, known) or f"Accepted: {', '.join(known) or 'none'}."
            raise ConfigValueError(f"{argument}: {' and '.join(functions) or 'nothing'} takes no {option!r}. {hint}")


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:  # it imports what is before the last point; importing that again says what is wrong
        return False


def _imported(name: str, *, argument: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigValueError(f"{argument}: importing {name!r} failed: {error}") from error
        here = [path.stem for path in Path.cwd().glob("*.py")] if "." not in error.name else []
        hint = did_you_mean(error.name, here)
        raise ConfigValueError(
            f"{argument}: there is no module {error.name!r}; looked in {os.getcwd()} and where Python looks."
            f"{hint and ' ' + hint}"
        ) from None
    except Exception as error:
        raise ConfigValueError(f"{argument}: importing {name!r} failed: {type(error).__name__}: {error}") from error


def _inside(module: ModuleType, attributes: str, *, argument: str) -> Any:
    found: Any = module
    path = module.__name__
    for name in attributes.split("."):
        if not hasattr(found, name):
            there = [each for each in dir(found) if each.isidentifier() and not each.startswith("_")]
            hint = did_you_mean(name, there) or f"There are {', '.join(there) or 'no public names'}."
            raise ConfigValueError(f"{argument}: {path} has no {name!r}. {hint}")
        found, path = getattr(found, name), f"{path}.{name}"
    return found
