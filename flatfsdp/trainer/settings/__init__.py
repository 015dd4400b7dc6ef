"""Settings: frozen dataclasses validated by pydantic, with one-line errors that name a setting as it was given: in
Python, in a file or on a command line."""

from __future__ import annotations

import importlib
import sys
import typing
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from flatfsdp.errors import ConfigTypeError, ConfigValueError, FlatFSDPError, did_you_mean, shown
from flatfsdp.trainer.settings.usual_names import USUAL_NAMES

try:
    from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, field_validator
    from pydantic.dataclasses import dataclass as dataclass

    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the trainer needs {error.name}, which its extra installs: pip install '.[train]' in a clone of flatfsdp",
        name=error.name,
    ) from error

# The prefix of a field's name in messages, and the name: `FSDPArguments.` `replicas` in a program,
# `train.toml: ` `fsdp.replicas` from a file, `argument ` `--replicas` on a command line. The reader of these sets it.
spelling: ContextVar[Callable[[type, str], tuple[str, str]]]
spelling = ContextVar("spelling", default=lambda owner, name: (f"{owner.__name__}.", name))
_CONFIG = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)


def setting(default: Any, help: str) -> Any:
    """A field of a class of settings: its default (`...` where it is required), and its meaning in a phrase."""
    return Field(default, description=help)


class Word(str):
    """A value from a command line, to be parsed according to the type of its field."""


class _OneLineErrors(type):
    def __call__(cls, *given: Any, **named: Any) -> Any:
        try:
            return super().__call__(*given, **named)
        except ValidationError as error:
            raise _complaint(cls, error) from None


@dataclass(frozen=True, config=_CONFIG)
class Settings(metaclass=_OneLineErrors):
    """Base of dataclasses of settings: fields are checked and normalized at construction.

    None may be written "none". Derived classes refuse contradictory values in their `__post_init__`.

    Attributes:
        of_flags: what flags begin with, where the names of fields alone would not be understood; that of the field
            `enabled` consists of it.

    Raises:
        ConfigTypeError, ConfigValueError: at construction, naming the field, the value and the accepted values.
    """

    of_flags = ""  # no field

    @field_validator("*", mode="wrap")
    @classmethod
    def _read(cls, value: Any, check: Callable[[Any], Any], field: Any) -> Any:
        parts = fields_of(cls)[field.field_name]
        if isinstance(value, str) and value.lower() == "none" and type(None) in parts:
            return None
        if isinstance(value, Word):
            return TypeAdapter(parts[0], config=_CONFIG).validate_strings(str(value))
        return check(value)

    def called(self, name: str) -> str:
        """The name of the field `name` in its source, for the middle of a sentence."""
        return spelling.get()(type(self), name)[1]

    def refuse(self, name: str, because: str) -> NoReturn:
        """Raise `ConfigValueError` on the field `name`, with its value and the reason."""
        place = "".join(spelling.get()(type(self), name))
        value = getattr(self, name)
        given = str(value) if isinstance(value, Path) else value
        raise ConfigValueError(f"{place}: got {given!r}, but {because}")


@cache
def fields_of(cls: type) -> dict[str, tuple[Any, ...]]:
    """The fields of a class of settings, each with the parts of its type: the type, the members of unions, and the
    functions that check it."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: tuple(_parts(hints[name])) for name in getattr(cls, "__dataclass_fields__", ())}


def _parts(annotation: Any) -> Iterator[Any]:
    yield getattr(annotation, "func", annotation)
    for each in filter(None, (typing.get_origin(annotation), *typing.get_args(annotation))):
        yield from _parts(each)


def nearest(name: str, known: Collection[str]) -> str:
    """A sentence with the known name for the same thing, the nearest one, or all of them where none is near."""
    if (ours := USUAL_NAMES.get(name)) in [*known]:
        return f"Did you mean {ours!r}?"
    return did_you_mean(name, known) or f"Accepted: {', '.join(map(repr, known)) or 'none'}."


def _complaint(cls: type, error: ValidationError) -> FlatFSDPError:
    """The first error of pydantic about a field."""
    found = error.errors()
    first, reason = found[0], found[0].get("ctx", {}).get("error")
    if isinstance(reason, FlatFSDPError) and not first["loc"]:  # from a `__post_init__`
        return reason
    place = first["loc"][:1]
    if first["type"] == "unexpected_positional_argument":
        return ConfigTypeError(f"{cls.__name__}: got {shown(first['input'])} without a name. Give settings by name.")
    name = place[0] if isinstance(place[0], str) else list(fields_of(cls))[place[0]]
    called = "".join(spelling.get()(cls, name))
    if first["type"].startswith("unexpected"):
        return ConfigTypeError(f"{cls.__name__}: unknown setting {name!r}. {nearest(name, fields_of(cls))}")
    if first["type"].startswith("missing"):
        return ConfigValueError(f"{called}: not given, and it has no default")
    errors = [each for each in found if each["loc"][:1] == place]  # for a union, one for each of its members
    reasons = [each.get("ctx", {}).get("error", f"{each['msg']}.") for each in errors]
    why = " Or: ".join(dict.fromkeys(map(str, reasons)))
    if first["type"].endswith("_type") or any(isinstance(each, ConfigTypeError) for each in reasons):
        return ConfigTypeError(f"{called}: got {shown(first['input'])}. {why}")
    return ConfigValueError(f"{called}: got {first['input']!r}. {why}")
