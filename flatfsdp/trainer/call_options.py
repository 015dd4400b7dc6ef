"""Which options a function takes by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flatfsdp.errors import ConfigValueError, did_you_mean


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` can be given an argument `name` by its name; True where that cannot be known."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a function of an extension
        return True
    if name in parameters:
        return parameters[name].kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def check_all_taken(options: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]], *, argument: str) -> None:
    """Refuse options that none of `functions`, by their names in messages, takes.

    Raises:
        ConfigValueError: the first such option, with the nearest name.
    """
    for option in options:
        if not any(takes(function, option) for function in functions.values()):
            known = {name: None for function in functions.values() for name in inspect.signature(function).parameters}
            hint = did_you_mean(option, known) or f"Accepted: {', '.join(known) or 'none'}."
            raise ConfigValueError(f"{argument}: {' and '.join(functions) or 'nothing'} takes no {option!r}. {hint}")
