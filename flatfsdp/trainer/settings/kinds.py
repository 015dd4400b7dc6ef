"""What a setting accepts, as data: a class for each kind of value, with its check, its words and its plain form."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from flatfsdp.errors import did_you_mean, refuse_type, refuse_value
from flatfsdp.trainer.settings.dtypes import DTYPE_NAMES, as_dtype, dtype_name

# "package.module:name", with attributes of the name, or "package.module.name".
REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
# How values are written down that only a Python program can hold: whoever reads them back is told.
_PYTHON_ONLY = re.compile(r"<python: .*>")


class Kind(ABC):
    """A kind of value.

    Attributes:
        accepted: what it takes, in words that follow "Accepted: ".
        metavar: what stands for it in the help of a command line.
    """

    accepted: str
    metavar: str = "VALUE"

    @abstractmethod
    def check(self, name: str, value: Any) -> Any:
        """`value` in its one normal form.

        Raises:
            ConfigTypeError, ConfigValueError: naming the setting by `name`, what was found and what is accepted.
        """

    def read(self, name: str, text: str) -> Any:
        """What `text` on a command line means, still to be checked; errors as of `check`."""
        return text

    def plain(self, value: Any) -> Any:
        """A checked value as JSON can hold it; `check` takes it back, unless only Python can hold the value."""
        return value


@dataclass(frozen=True)
class Number(Kind):
    """An `int` or a finite `float` within bounds; a whole number is a `float`, too, but not the other way round."""

    type: type[int] | type[float]
    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    accepted: str = field(init=False)
    metavar: str = field(init=False)

    def __post_init__(self) -> None:
        words = "a whole number" if self.type is int else "a number"
        words += f" from {self.least:g} up" if self.least > -math.inf else ""
        words += f" above {self.above:g}" if self.above > -math.inf else ""
        if self.below < math.inf:
            words = f"{words.removesuffix(' up')} to below {self.below:g}"
        object.__setattr__(self, "accepted", words)
        object.__setattr__(self, "metavar", "N" if self.type is int else "X")

    def check(self, name: str, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int if self.type is int else (int, float)):
            refuse_type(name, value, self.accepted)
        try:
            found = self.type(value)
        except OverflowError:  # a whole number that no float holds
            refuse_value(name, value, self.accepted)
        inside = self.above < found < self.below and found >= self.least
        return found if inside and abs(found) != math.inf else refuse_value(name, value, self.accepted)

    def read(self, name: str, text: str) -> Any:
        try:
            return self.type(text)
        except ValueError:
            refuse_value(name, text, self.accepted)


COUNT = Number(int, least=1)
WHOLE = Number(int, least=0)
POSITIVE = Number(float, above=0)
NOT_NEGATIVE = Number(float, least=0)


@dataclass(frozen=True)
class Flag(Kind):
    """True or false."""

    accepted: str = "true or false"
    metavar: str = "true|false"

    def check(self, name: str, value: Any) -> bool:
        return value if isinstance(value, bool) else refuse_type(name, value, self.accepted)

    def read(self, name: str, text: str) -> Any:
        return {"true": True, "false": False}.get(text.lower(), text)


@dataclass(frozen=True)
class FlagOrCount(Flag):
    """True, false, or a whole number from 1 up."""

    accepted: str = "true, false, or a whole number from 1 up"
    metavar: str = "true|false|N"

    def check(self, name: str, value: Any) -> Any:
        return COUNT.check(name, value) if type(value) is int else super().check(name, value)

    def read(self, name: str, text: str) -> Any:
        return int(text) if text.isdecimal() else super().read(name, text)


@dataclass(frozen=True)
class Name(Kind):
    """One of some names, in any case, with `-` for `_` if need be; a member of an enum counts by its name."""

    names: tuple[str, ...]
    metavar: str = "NAME"

    @property
    def accepted(self) -> str:  # type: ignore[override]  # a property in place of the attribute
        return f"one of {', '.join(self.names)}"

    def check(self, name: str, value: Any) -> str:
        value = value.name if isinstance(value, Enum) else value
        if not isinstance(value, str):
            refuse_type(name, value, self.accepted)
        found = value.lower().replace("-", "_").strip("_")
        if found not in self.names:
            refuse_value(name, value, self.accepted, hint=did_you_mean(found, self.names))
        return found


@dataclass(frozen=True)
class Text(Kind):
    """Text that is not empty."""

    accepted: str = "text"
    metavar: str = "TEXT"

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            refuse_type(name, value, self.accepted)
        return value or refuse_value(name, value, self.accepted)


@dataclass(frozen=True)
class PathOr(Kind):
    """A path, or one of some words that mean something else; only the words stay text."""

    words: tuple[str, ...] = ()
    metavar: str = "PATH"

    @property
    def accepted(self) -> str:  # type: ignore[override]
        return "".join(f"{word!r}, " for word in self.words) + f"{'or ' if self.words else ''}a path"

    def check(self, name: str, value: Any) -> str | Path:
        if isinstance(value, str) and value in self.words:
            return value
        if not isinstance(value, (str, os.PathLike)):
            refuse_type(name, value, self.accepted)
        return Path(value) if os.fspath(value) else refuse_value(name, value, self.accepted)

    def plain(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True)
class DType(Kind):
    """A floating-point dtype, or one of its names; normalised to the `torch.dtype`."""

    accepted: str = f"a floating-point dtype: {', '.join(DTYPE_NAMES)}"
    metavar: str = "DTYPE"

    def check(self, name: str, value: Any) -> Any:
        return as_dtype(value, argument=name)

    def plain(self, value: Any) -> str:
        return dtype_name(value)


@dataclass(frozen=True)
class Table(Kind):
    """Names and values, for a function that the settings name; on a command line `key=value` or a JSON object."""

    accepted: str = "a table of names and values"
    metavar: str = "KEY=VALUE"

    def check(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            refuse_type(name, value, self.accepted)
        for text in _texts(value):
            if hint := python_only_hint(text):
                refuse_value(name, text, self.accepted, hint=hint)
        return dict(value)

    def read(self, name: str, text: str) -> Any:
        key, equals, value = text.partition("=")
        if text.startswith("{"):
            try:
                return json.loads(text)
            except ValueError as error:
                refuse_value(name, text, f"{self.accepted}, as JSON", hint=f"{error}.")
        if not equals or not key:
            refuse_value(name, text, "key=value, or a JSON object")
        try:
            return {key: json.loads(value)}
        except ValueError:
            return {key: value}

    def plain(self, value: Any) -> dict[str, Any]:
        return {key: _plain(each) for key, each in value.items()}


@dataclass(frozen=True)
class Reference(Kind):
    """Something to import or call: one of some names, "package.module:name", or from Python the `thing` itself."""

    thing: str
    names: tuple[str, ...] = ()
    is_thing: Callable[[Any], bool] = lambda value: True
    reasons: Mapping[str, str] = field(default_factory=dict)
    metavar: str = "NAME"

    @property
    def accepted(self) -> str:  # type: ignore[override]
        return "".join(f"{name}, " for name in self.names) + f"'package.module:name', or from Python {self.thing}"

    def check(self, name: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value if value is not None and self.is_thing(value) else refuse_type(name, value, self.accepted)
        if value.lower() in self.names:
            return value.lower()
        if REFERENCE.fullmatch(value):
            return value
        hint = self.reasons.get(value.lower()) or python_only_hint(value) or did_you_mean(value.lower(), self.names)
        refuse_value(name, value, self.accepted, hint=hint)

    def names_code(self, value: Any) -> bool:
        """Whether `value` is the name of something to import, whose code runs then."""
        return isinstance(value, str) and value not in self.names

    def plain(self, value: Any) -> Any:
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(module, str) and isinstance(name, str) and module != "__main__":
            found: Any = sys.modules.get(module)
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is value:
                return f"{module}:{name}"
        return value if isinstance(value, str) else _in_words(value)


@dataclass(frozen=True)
class Units(Kind):
    """Which submodules become units: names in a file, from Python also what `auto_wrap_policy` accepts."""

    accepted: str = (
        "'auto', 'none', the dotted path of a container of layers or of a module, the name of a class, "
        "a list of paths and classes, or from Python an auto_wrap_policy"
    )
    metavar: str = "WHICH"

    def check(self, name: str, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(name, value)
        if isinstance(value, (list, tuple)) and any(isinstance(each, str) for each in value):
            return tuple(self._one_of_list(f"{name}[{index}]", each) for index, each in enumerate(value))
        if value is None or isinstance(value, (bool, int, float, Mapping)) or value in ([], ()):
            refuse_type(name, value, self.accepted)
        return value

    def read(self, name: str, text: str) -> Any:
        return text.split(",") if "," in text else text

    def plain(self, value: Any) -> Any:
        if isinstance(value, (set, frozenset, list, tuple)):
            return (
                sorted(map(self.plain, value)) if isinstance(value, (set, frozenset)) else list(map(self.plain, value))
            )
        return value.__name__ if isinstance(value, type) else _plain(value)

    def _one_of_list(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            refuse_type(name, value, "a dotted path or the name of a class")
        if value in ("auto", "none"):
            refuse_value(name, value, "a dotted path or the name of a class", hint="It stands alone, not in a list.")
        return self._text(name, value)

    def _text(self, name: str, value: str) -> str:
        if not re.fullmatch(r"\w+(\.\w+)*", value):
            refuse_value(name, value, self.accepted, hint=python_only_hint(value))
        return value


def python_only_hint(text: str) -> str:
    """The sentence for a text that `plain` wrote in the place of what only Python can hold; empty for others."""
    if not _PYTHON_ONLY.fullmatch(text):
        return ""
    return "It was an object of a Python program, which no file can hold: hand it over from Python, or name it."


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it, and in words where it cannot."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return _in_words(value)


def _in_words(value: Any) -> str:
    return f"<python: {getattr(value, '__qualname__', type(value).__name__)}>"


def _texts(value: Any) -> Iterator[str]:
    """Every text inside of a nested value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)
