"""Settings: frozen dataclasses whose fields say what they accept; from tables, from files, and back to tables.

A field is declared by `setting(default, help, kind)`. Where a value comes from decides what messages call it
(`FSDPArguments.replicas` in a program, `train.toml: fsdp.replicas` from a file, `argument --replicas` on a command
line): checks ask for it, and readers say it for a while, by `calling()`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from flatfsdp.errors import ConfigTypeError, ConfigValueError, did_you_mean, shown
from flatfsdp.trainer.settings.kinds import Flag, Kind, Number, PathOr, Text

__all__ = [
    "Called",
    "Setting",
    "Settings",
    "build",
    "called",
    "calling",
    "check_tables",
    "flag_of",
    "from_dict",
    "from_tables",
    "read_file",
    "setting",
    "settings_of",
    "to_dict",
]

_SettingsT = TypeVar("_SettingsT")


@dataclass(frozen=True)
class Setting:
    """A field of a dataclass, as it was declared.

    Attributes:
        name: of the field.
        kind: what it accepts.
        help: what it means, in a phrase.
        optional: whether None is accepted too, which files and command lines spell "none".
        default: what it is if nobody gives it; `MISSING` if somebody must.
    """

    name: str
    kind: Kind
    help: str
    optional: bool
    default: Any

    @property
    def flag(self) -> str:
        """Its option on a command line."""
        return flag_of(self.name)

    def check(self, name: str, value: Any) -> Any:
        """`value` in its normal form; errors, which call the setting `name`, as of `Kind.check`."""
        if self.optional and (value is None or (isinstance(value, str) and value.lower() == "none")):
            return None
        return self.kind.check(name, value)

    def read(self, name: str, text: str) -> Any:
        """What `text` on a command line means, still to be checked; errors as of `check`."""
        return None if self.optional and text.lower() == "none" else self.kind.read(name, text)


def flag_of(name: str) -> str:
    """The option that a setting is on a command line."""
    return "--" + name.replace("_", "-")


def setting(default: Any, help: str, kind: Kind | None = None, *, optional: bool | None = None) -> Any:
    """Declare a field of a dataclass.

    Args:
        default: its default, which is copied where it is a dict; `MISSING` for a field that must be given.
        help: what it means, in a phrase without a point.
        kind: what it accepts; None for what its annotation says: bool, int, float, str or Path.
        optional: whether it accepts None; None for whether that is its default.
    """
    metadata = {"help": help, "kind": kind, "optional": default is None if optional is None else optional}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def settings_of(cls: type) -> tuple[Setting, ...]:
    """The fields of a dataclass, in order; those that `setting` did not declare go by annotation and default."""
    annotations = typing.get_type_hints(cls)
    found = []
    for each in filter(lambda field: field.init, dataclasses.fields(cls)):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        found.append(
            Setting(
                name=each.name,
                kind=each.metadata.get("kind") or _kind_of(cls, each.name, annotations[each.name]),
                help=each.metadata.get("help", ""),
                optional=each.metadata.get("optional", default is None),
                default=default,
            )
        )
    return tuple(found)


_KINDS: dict[Any, Kind] = {bool: Flag(), int: Number(int), float: Number(float), str: Text(), Path: PathOr()}


def _kind_of(owner: type, name: str, annotation: Any) -> Kind:
    choices = [annotation]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        choices = [each for each in typing.get_args(annotation) if each is not type(None)]
    if len(choices) != 1 or choices[0] not in _KINDS:
        raise ConfigTypeError(
            f"{owner.__name__}.{name}: its annotation {annotation} does not say what it accepts. "
            f"Give a kind: setting(default, help, kind)."
        )
    return _KINDS[choices[0]]


# --- What settings are called -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Called:
    """What a setting is called by whoever gave it: `name`, and where that begins a message, `place` before it."""

    name: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.place}{self.name}"


_calling: ContextVar[Callable[[type, str], Called]] = ContextVar(
    "_calling", default=lambda owner, name: Called(name, f"{owner.__name__}.")
)


def called(owner: type, name: str) -> Called:
    """What the field `name` of the dataclass `owner` is called at present."""
    return _calling.get()(owner, name)


@contextmanager
def calling(spelling: Callable[[type, str], Called]) -> Iterator[None]:
    """A context in which messages call the field `name` of a dataclass `owner` as `spelling(owner, name)` says."""
    token = _calling.set(spelling)
    try:
        yield
    finally:
        _calling.reset(token)


class Settings:
    """Base of dataclasses of settings: fields are checked, and put into their normal form, as one is made.

    Raises:
        ConfigTypeError, ConfigValueError: at construction, naming the field, what was found and what is accepted.
    """

    def __post_init__(self) -> None:
        for each in settings_of(type(self)):
            value = each.check(str(called(type(self), each.name)), getattr(self, each.name))
            object.__setattr__(self, each.name, value)
        self.check_together()

    def check_together(self) -> None:
        """Refuse values that contradict each other; for derived classes to fill."""

    def called(self, name: str) -> str:
        """What whoever gave the field `name` calls it, for the middle of a sentence."""
        return called(type(self), name).name

    def refuse(self, name: str, because: str) -> NoReturn:
        """Raise `ConfigValueError` on the field `name`, with its value and the reason."""
        raise ConfigValueError(f"{called(type(self), name)}: got {getattr(self, name)!r}, but {because}")


# --- Tables -----------------------------------------------------------------------------------------------------------


def from_dict(cls: type[_SettingsT], mapping: Mapping[str, Any], *, where: str = "") -> _SettingsT:
    """A dataclass of settings from a table of its fields.

    Args:
        cls: the dataclass.
        mapping: values by the names of fields; those left out have their defaults.
        where: what messages begin with, such as "train.toml: fsdp"; the name of the class if empty.

    Raises:
        ConfigTypeError, ConfigValueError: a key is no field, with the nearest one; a field is missing; or a value.
    """
    where = where or cls.__name__
    check_names(cls, mapping, where=where)
    with calling(lambda _, name: Called(name, f"{where}.")):
        return build(cls, mapping)


def from_tables(classes: Mapping[str, type], tables: Mapping[str, Any], *, where: str = "") -> dict[str, Any]:
    """One dataclass for each table: `classes` says which; those whose table is left out have their defaults.

    Args:
        classes: dataclasses by the name of their table.
        tables: as a file has them: a table of values for each name.
        where: what messages begin with, such as the file.

    Raises:
        ConfigTypeError, ConfigValueError: as `from_dict`; a name is no table, with the nearest one.
    """
    check_tables(classes, tables, where=where)
    place = f"{where}: " if where else ""
    return {name: from_dict(cls, tables.get(name, {}), where=f"{place}{name}") for name, cls in classes.items()}


def check_tables(classes: Mapping[str, type], tables: Mapping[str, Any], *, where: str = "") -> None:
    """Refuse what is no table of `classes`, and in tables what is no field; errors as of `from_tables`."""
    place = f"{where}: " if where else ""
    for name, table in tables.items():
        if name in classes:
            check_names(classes[name], table, where=f"{place}{name}", others=classes)
        elif home := _home(name, classes):
            raise ConfigValueError(f"{place}{name!r} stands outside of any table. It belongs into [{home}].")
        else:
            raise ConfigValueError(f"{place}unknown table {name!r}. {_nearest(name, classes)}")


def check_names(cls: type, table: Any, *, where: str, others: Mapping[str, type] | None = None) -> None:
    """Refuse what is no table, and keys that are no fields of `cls` (but perhaps of one of `others`); errors as of
    `from_dict`."""
    known = [each.name for each in settings_of(cls)]
    if not isinstance(table, Mapping):
        raise ConfigTypeError(f"{where}: got {shown(table)}. Accepted: a table of settings.")
    for key in table:
        if key not in known:
            home = _home(key, others or {})
            hint = f"It belongs into [{home}]." if home else _nearest(key, known)
            raise ConfigValueError(f"{where}: unknown setting {key!r}. {hint}")


def build(cls: type[_SettingsT], values: Mapping[str, Any]) -> _SettingsT:
    """The dataclass `cls` of these fields; errors as of `from_dict`, in the words of `calling`."""
    given = {}
    for each in settings_of(cls):
        if each.name in values:
            given[each.name] = each.check(str(called(cls, each.name)), values[each.name])
        elif each.default is MISSING:
            raise ConfigValueError(f"{called(cls, each.name)}: not given, and it has no default")
    return cls(**given)


def _home(name: str, classes: Mapping[str, type]) -> str | None:
    """The first of `classes` that has a field `name`."""
    return next((home for home, cls in classes.items() if name in {each.name for each in settings_of(cls)}), None)


def _nearest(name: Any, known: Iterable[str]) -> str:
    """The sentence with the nearest of the known names, or with all of them where none is near."""
    return did_you_mean(str(name), known) or f"Accepted: {', '.join(known)}."


def to_dict(settings: Any) -> dict[str, Any]:
    """The fields of a dataclass of settings as JSON can hold them, for logs and checkpoints.

    `from_dict` makes an equal one of it, unless it held what only Python can hold (a model, a lambda): that is told in
    words, which `from_dict` refuses.
    """
    return {
        each.name: None if (value := getattr(settings, each.name)) is None else each.kind.plain(value)
        for each in settings_of(type(settings))
    }


# --- Files ------------------------------------------------------------------------------------------------------------


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a TOML or JSON file, told apart by its suffix.

    TOML needs Python 3.11, or the package tomli.

    Raises:
        ConfigValueError: there is no such file, it cannot be read, or is none of the two; says where.
    """
    path = Path(path)
    readers: dict[str, Callable[[str], Any]] = {".toml": _parse_toml, ".json": json.loads}
    if path.suffix.lower() not in readers:
        raise ConfigValueError(f"{path}: its name ends with {path.suffix!r}. Accepted: .toml or .json.")
    try:
        found = readers[path.suffix.lower()](path.read_text(encoding="utf-8"))
    except ConfigValueError as error:
        raise ConfigValueError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # of both parsers, and of bytes that are no text
        raise ConfigValueError(f"{path}: no valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigValueError(f"{path}: got a {type(found).__name__}. Accepted: an object with one table per group.")
    return found


def _parse_toml(text: str) -> dict[str, Any]:
    for name in ("tomllib", "tomli"):
        try:
            return dict(importlib.import_module(name).loads(text))
        except ModuleNotFoundError:
            continue
    raise ConfigValueError("reading TOML needs Python 3.11, or `pip install tomli`; JSON works everywhere")
