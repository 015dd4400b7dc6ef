"""Settings: frozen dataclasses that pydantic checks, with errors of one line that name a setting as it was given, from
Python, from a file or on a command line."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from flatfsdp.errors import ConfigTypeError, ConfigValueError, did_you_mean, shown

try:
    from pydantic import ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError
    from pydantic.dataclasses import dataclass as dataclass

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the trainer needs {error.name}, which its extra installs: pip install 'flatfsdp[train]'", name=error.name
    ) from error


_Function = TypeVar("_Function", bound=Callable[..., Any])

# What stands before the name of a field in messages, and the name: `FSDPArguments.` `replicas` in a program,
# `train.toml: ` `fsdp.replicas` from a file, `argument ` `--replicas` on a command line. Who reads these sets it.
Spelling = Callable[[type, str], tuple[str, str]]
spelling: ContextVar[Spelling] = ContextVar("spelling", default=lambda owner, name: (f"{owner.__name__}.", name))
_CONFIG = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)


def setting(default: Any, help: str) -> Any:
    """A field of a class of settings: its default (`...` where it must be given), and its meaning in a phrase."""
    return Field(default, description=help)


class _Checked(type):
    def __call__(cls, *given: Any, **named: Any) -> Any:
        try:
            return super().__call__(*given, **{name: _or_none(cls, name, value) for name, value in named.items()})
        except ValidationError as error:
            raise _complaint(cls, error) from None


class Settings(metaclass=_Checked):
    """Base of dataclasses of settings: fields are checked, and put into their normal form, as one is made.

    None may be written "none".

    Raises:
        ConfigTypeError, ConfigValueError: at construction, naming the field, what was found and what is accepted.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    def __post_init__(self) -> None:
        self.check_together()

    def check_together(self) -> None:
        """Refuse values that contradict each other; for derived classes to fill."""

    def called(self, name: str) -> str:
        """The name of the field `name` where it was given, for the middle of a sentence."""
        return spelling.get()(type(self), name)[1]

    def refuse(self, name: str, because: str) -> NoReturn:
        """Raise `ConfigValueError` on the field `name`, with its value and the reason."""
        place = "".join(spelling.get()(type(self), name))
        raise ConfigValueError(f"{place}: got {getattr(self, name)!r}, but {because}")


def from_text(cls: type[Settings], name: str, text: str | bool) -> Any:
    """The value of the field `name` that `text` means; errors as of the class."""
    if _or_none(cls, name, text) is None:
        return None
    try:
        return TypeAdapter(fields_of(cls)[name][0], config=_CONFIG).validate_strings(str(text))
    except ValidationError as error:
        raise _complaint(cls, error, name) from None


def fields_of(cls: type) -> dict[str, list[Any]]:
    """The fields of a class of settings, each with the parts of its type: the whole, the members of unions, and the
    functions that check it."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: list(_parts(hints[name])) for name in getattr(cls, "__dataclass_fields__", ())}


def nearest(name: str, known: Iterable[str]) -> str:
    """The sentence with the nearest of the known names, or with all of them where none is near."""
    return did_you_mean(name, known) or f"Accepted: {', '.join(known)}."


def _parts(annotation: Any) -> Iterator[Any]:
    yield getattr(annotation, "func", annotation)
    for each in typing.get_args(annotation):
        yield from _parts(each)


def _or_none(cls: type, name: str, value: Any) -> Any:
    is_none = isinstance(value, str) and value.lower() == "none"
    return None if is_none and type(None) in fields_of(cls).get(name, ()) else value


def _complaint(cls: type, error: ValidationError, field: str = "") -> ConfigTypeError | ConfigValueError:
    """The first complaint of pydantic about a field; `field` where not an instance was checked, but its value."""
    found = error.errors()
    first, reason = found[0], found[0].get("ctx", {}).get("error")
    if isinstance(reason, ConfigValueError) and not (field or first["loc"]):  # of `check_together`
        return reason
    place = first["loc"][:1]
    name = field or (place[0] if isinstance(place[0], str) else list(fields_of(cls))[place[0]])
    called = "".join(spelling.get()(cls, name))
    if first["type"].startswith("unexpected"):
        return ConfigTypeError(f"{cls.__name__}: unknown setting {name!r}. {nearest(name, fields_of(cls))}")
    if first["type"].startswith("missing"):
        return ConfigValueError(f"{called}: not given, and it has no default")
    errors = [each for each in found if field or each["loc"][:1] == place]  # of a union one for each of its members
    why = " Or: ".join(dict.fromkeys(str(each.get("ctx", {}).get("error", f"{each['msg']}.")) for each in errors))
    if first["type"].endswith("_type") or isinstance(reason, ConfigTypeError):
        return ConfigTypeError(f"{called}: got {shown(first['input'])}. {why}")
    return ConfigValueError(f"{called}: got {first['input']!r}. {why}")


# --- types that pydantic lacks, or checks less strictly ---------------------------------------------------------------


# "package.module:name", with attributes of the name, or "package.module.name".
REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


@dataclasses.dataclass(frozen=True, eq=False)
class Name:
    """One of some names, in any case, with `-` for `_` if need be, or a member of an enum by its name.

    With `thing` also what is to be imported or called: "package.module:name", or from Python the thing itself; and with
    `schemes` what begins with one of them and a colon.
    """

    names: Iterable[str] = ()
    thing: str = ""
    is_thing: Callable[[Any], bool] = lambda value: True
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    schemes: tuple[str, ...] = ()

    def __call__(self, value: Any) -> Any:
        value = value.name if isinstance(value, Enum) else value
        things = ["'package.module:name'", f"or from Python {self.thing}"] if self.thing else []
        things = [*(f"'{scheme}:...'" for scheme in self.schemes), *things]
        accepted = f"Accepted: {'' if things else 'one of '}{', '.join([*self.names, *things])}."
        if not isinstance(value, str):
            if value is None or not self.thing or not self.is_thing(value):
                raise ConfigTypeError(accepted)
            return value
        scheme, colon, rest = value.partition(":")
        if scheme in self.schemes and colon and rest:
            return value
        found = value.lower().replace("-", "_").strip("_")
        if found not in self.names and not (self.thing and REFERENCE.fullmatch(value)):
            hint = self.reasons.get(found) or did_you_mean(found, self.names)
            raise ConfigValueError(f"{accepted} {hint}".rstrip())
        return found if found in self.names else value


def path(value: Any) -> Path:
    """A path, also of text."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ConfigTypeError("Accepted: a path.")
    return Path(value)


_SEVERAL: dict[Callable[..., Any], str] = {}  # functions that check a list of words, and what the help calls one


def of_several(word: str) -> Callable[[_Function], _Function]:
    """Mark the function of a `PlainValidator`: on a command line it gets all words behind the flag, as a list."""

    def mark(function: _Function) -> _Function:
        _SEVERAL[function] = word
        return function

    return mark


@of_several("KEY=VALUE")
def options(value: Any) -> dict[str, Any]:
    """Names and values, also of a list of tables and texts (`key=value`, JSON objects), each over those before."""
    found: dict[str, Any] = {}
    for each in value if isinstance(value, list) else [value]:
        name, equals, text = each.partition("=") if isinstance(each, str) else ("", "", "")
        table = {name: _json(text)} if name and equals and name[0] != "{" else _json(each)
        if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table):
            raise ConfigTypeError("Accepted: a table of names and values; as text key=value, or a JSON object.")
        found |= table
    return found


def _json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):  # a value, or plain text
        return text


FilePath = Annotated[Path, PlainValidator(path)]
Options = Annotated[dict[str, Any], PlainValidator(options)]


# --- from a command line and a file: flags count over the file, the file over the defaults ----------------------------


_WORDS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}  # for values, in the help


class Parser(argparse.ArgumentParser):
    """Reads `--config FILE` and a flag for every field of its groups; complaints are one line.

    Args:
        prog: the program, such as "python -m flatfsdp.train".
        groups: settings whose values are the defaults, by the name of their table in a file, which heads their part
            of the help. No two have fields of one name.
        description: what the program does.
    """

    def __init__(self, prog: str, *, groups: Mapping[str, Settings], description: str = "") -> None:
        super().__init__(prog=prog, usage="%(prog)s [options]", description=description, allow_abbrev=False)
        self.groups = groups
        tables = ", ".join(f"[{name}]" for name in groups)
        self.add_argument("--config", metavar="FILE", help=f"TOML or JSON with {tables}; flags count over it")
        for group, given in groups.items():
            flags = self.add_argument_group(group, (given.__doc__ or "").partition("\n")[0])
            for name, parts in fields_of(type(given)).items():
                flags.add_argument(flag_of(name), help=_help(given, name, parts), **_form(parts))

    def error(self, message: str) -> NoReturn:
        """Print `message` as one line on stderr and exit with code 2."""
        name = self.prog.removeprefix("python -m ")
        print(f"{name}: {' '.join(message.split())} (--help lists the options)", file=sys.stderr)
        raise SystemExit(2)

    def read(self, arguments: Sequence[str] | None = None) -> dict[str, Any]:
        """The groups from `arguments` (None: the program's own).

        What is wrong, also in the file, ends the program by one line on stderr and exit code 2.
        """
        found, rest = self.parse_known_args(arguments)
        if rest:
            name = rest[0].partition("=")[0]
            known = re.findall(r"--[\w-]+", self.format_help())
            longer = [flag for flag in known if name.startswith("--") and flag.startswith(name)]
            self.error(f"unknown argument {name!r}. {did_you_mean(name, longer[:1] or known)}")
        flags = {name: value for name, value in vars(found).items() if value is not None}
        path = flags.pop("config", "")
        try:
            tables = read_file(path) if path else {}
            self._check_names(tables, self.groups, f"{path}: unknown table")
            return {group: self._made(group, path, tables.get(group, {}), flags) for group in self.groups}
        except (ConfigTypeError, ConfigValueError) as error:
            self.error(str(error))

    def _check_names(self, names: Mapping[str, Any], known: Mapping[str, Any], place: str) -> None:
        for name in (each for each in names if each not in known):
            home = next((group for group, given in self.groups.items() if name in fields_of(type(given))), None)
            hint = f"It belongs into [{home}]." if home else nearest(name, known)
            raise ConfigValueError(f"{place} {name!r}. {hint}")

    def _made(self, group: str, path: str, table: Any, flags: Mapping[str, Any]) -> Any:
        if not isinstance(table, Mapping):
            raise ConfigTypeError(f"{path}: {group}: got {shown(table)}. Accepted: a table of settings.")
        cls, values = type(self.groups[group]), {**vars(self.groups[group]), **table}
        fields = fields_of(cls)
        self._check_names(table, fields, f"{path}: {group}: unknown setting")

        def spelled(_: type, name: str) -> tuple[str, str]:
            from_file = name in table and name not in flags
            return (f"{path}: ", f"{group}.{name}") if from_file else ("argument ", flag_of(name))

        token = spelling.set(spelled)
        try:
            for name in (each for each in fields if each in flags):
                given, before = flags[name], [values[name]] * bool(values[name])  # a key counts over it below
                both = [*before, *given] if isinstance(given, list) else [from_text(cls, name, given)]
                values[name] = both if both[1:] else both[0]
            return cls(**values)
        finally:
            spelling.reset(token)


def flag_of(name: str) -> str:
    """The option that a field is on a command line."""
    return "--" + name.replace("_", "-")


def read_file(path: str) -> dict[str, Any]:
    """The tables of a TOML or JSON file, which its suffix distinguishes.

    Raises:
        ConfigValueError: there is no such file, it cannot be read, or is none of the two; names the file.
    """
    kind = Path(path).suffix.lower()
    if kind not in (".toml", ".json"):
        raise ConfigValueError(f"{path}: its name ends with {kind!r}. Accepted: .toml or .json.")
    try:
        found = (tomllib if kind == ".toml" else json).loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # of both parsers, and of bytes that are no text
        raise ConfigValueError(f"{path}: no valid {kind[1:].upper()}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigValueError(f"{path}: got a {type(found).__name__}. Accepted: an object with one table per group.")
    return found


def _form(parts: Sequence[Any]) -> dict[str, Any]:
    """How argparse reads a field of such types."""
    if bool in parts and int not in parts:
        return {"action": argparse.BooleanOptionalAction}
    if several := next((_SEVERAL[part] for part in parts if inspect.isfunction(part) and part in _SEVERAL), ""):
        return {"action": "extend", "nargs": "+", "metavar": several}
    return {"metavar": next((_WORDS[each] for each in parts if each in _WORDS), "VALUE")}


def _help(given: Any, name: str, parts: Sequence[Any]) -> str:
    """The meaning of a field with its names, and its default where that is worth showing: false and none are not."""
    default, meaning = getattr(given, name), given.__pydantic_fields__[name].description or ""
    names = [each for part in parts if isinstance(part, Name) for each in part.names]
    if not all(each in meaning for each in names):
        meaning += f": {', '.join(names)}"
    if default not in (None, False, {}, ()):
        meaning += " (the default)" if default is True else f" (default: {default})"
    return meaning.replace("%", "%%")
