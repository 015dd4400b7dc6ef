"""Values of JSON that somebody else has written, required to be what they are to be: ValueError in words elsewhere."""

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
    """The value that `data` stands for."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _of_kind(kind: type[T], name: str, value: Any, what: str) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{what} is {_shown(value)}, no {name}")
    return value


# Each takes the value, and what it is.
mapping: Callable[[Any, str], dict[str, Any]] = partial(_of_kind, dict, "object")
items: Callable[[Any, str], list[Any]] = partial(_of_kind, list, "list")
text: Callable[[Any, str], str] = partial(_of_kind, str, "string")


def whole(value: Any, what: str, *, least: int = 0) -> int:
    """An integer from `least` on, such as a file or a tensor can have."""
    if type(value) is not int or not least <= value < _LARGEST:
        raise ValueError(f"{what} is {_shown(value)}, no integer of at least {least}")
    return value


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can be, NaN and infinities included."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000)


def moment(value: Any, what: str) -> float:
    """A time in seconds since 1970 that a calendar has."""
    if not is_number(value) or not 0 <= value < 1e11:
        raise ValueError(f"{what} is {_shown(value)}, no time")
    return float(value)


def dims(value: Any, what: str) -> tuple[int, ...]:
    """A shape of which a tensor can be made."""
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
