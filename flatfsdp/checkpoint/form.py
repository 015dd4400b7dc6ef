"""Validation of JSON values from files: each function returns the checked value or raises a ValueError."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeVar

T = TypeVar("T")

_LARGEST = 2**62


def parse(data: bytes | bytearray) -> Any:
    """The JSON value in `data`."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _of_type(cls: type[T], name: str, value: Any, what: str) -> T:
    if not isinstance(value, cls):
        raise ValueError(f"{what} is {_shown(value)}, not {name}")
    return value


# Arguments of each: the value, and a name of it for errors.
mapping: Callable[[Any, str], dict[str, Any]] = partial(_of_type, dict, "an object")
items: Callable[[Any, str], list[Any]] = partial(_of_type, list, "a list")
text: Callable[[Any, str], str] = partial(_of_type, str, "a string")


def whole(value: Any, what: str, *, least: int = 0) -> int:
    """An integer from `least` on, in the range of sizes of files and tensors."""
    if type(value) is not int or not least <= value < _LARGEST:
        raise ValueError(f"{what} is {_shown(value)}, not an integer of at least {least}")
    return value


def is_number(value: Any) -> bool:
    """Whether a float can represent the number, NaN and infinities included."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000)


def moment(value: Any, what: str) -> float:
    """A time in seconds since 1970, in the range of calendars."""
    if not is_number(value) or not 0 <= value < 1e11:
        raise ValueError(f"{what} is {_shown(value)}, not a time")
    return float(value)


def dims(value: Any, what: str) -> tuple[int, ...]:
    """A shape that a tensor can have."""
    shape = tuple(whole(size, what) for size in items(value, what))
    if math.prod(max(size, 1) for size in shape) >= _LARGEST:
        raise ValueError(f"{what} is {_shown(value)}, larger than any tensor")
    return shape


def inner_name(value: Any, what: str) -> str:
    """The name of a file inside a folder."""
    name = text(value, what)
    path = PurePosixPath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts or str(path) != name or name == ".":
        raise ValueError(f"{what} is {_shown(value)}, which names no file inside the folder")
    return name


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60]
