"""Settings from a command line and a file: flags override the file, and the file overrides the defaults."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from flatfsdp.errors import ConfigTypeError, ConfigValueError, did_you_mean, shown
from flatfsdp.trainer.settings import Settings, Word, fields_of, nearest, spelling, toml
from flatfsdp.trainer.settings.types import Name
from flatfsdp.trainer.settings.usual_names import USUAL_NAMES

# Names of types in the help. A flag takes several values of the first two types, added to those of the file.
_WORDS = {tuple: "NAME", dict: "KEY=VALUE", int: "N", float: "X", Path: "PATH", str: "TEXT"}

QUOTES = "'\""


class Parser(argparse.ArgumentParser):
    """Reads `--config FILE` and a flag for every field of its groups; errors are one line.

    Args:
        prog: the program, such as "python -m flatfsdp.train".
        groups: the default values of the settings, by the name of their table in a file, which is also their heading
            in the help. No two groups have fields with the same name.
        description: the purpose of the program.
        common: the names of the fields that `--help` shows; `--help all` shows all of them. None for all.
    """

    def __init__(
        self, prog: str, *, groups: Mapping[str, Settings], description: str = "", common: Collection[str] | None = None
    ) -> None:
        super().__init__(
            prog=prog, usage="%(prog)s [options]", description=description, allow_abbrev=False, add_help=False
        )
        self.groups = groups
        self._with_all = partial(Parser, prog, groups=groups, description=description)
        self._flags = ["--help", "--config"]
        shown = {name for given in groups.values() for name in fields_of(type(given))}
        if common is not None:
            shown &= {*common}
            self.epilog = "--help all lists every option."
        else:
            self.epilog = "The value none selects a default that is described in words."
        self.add_argument("-h", "--help", nargs="?", const="common", metavar="all", help="show this message and exit")
        tables = ", ".join(f"[{name}]" for name in groups)
        self.add_argument(
            "--config", metavar="FILE", help=f"TOML or JSON file with the tables {tables}; flags override it"
        )
        for group, given in groups.items():
            fields = fields_of(type(given))
            title = (given.__doc__ or "").partition("\n")[0] if shown & fields.keys() else None
            flags = self.add_argument_group(group, title)
            for name, parts in fields.items():
                text = self._help(given, name, parts) if name in shown else argparse.SUPPRESS
                flag = flag_of(key_of(type(given), name))
                self._flags += flags.add_argument(flag, help=text, **_form(parts)).option_strings

    def error(self, message: str) -> NoReturn:
        """Print `message` as one line on stderr and exit with code 2."""
        name, line = self.prog.removeprefix("python -m "), " ".join(message.split())
        line = in_flags(line, map(type, self.groups.values()))
        self.exit(2, f"{name}: {line} (--help lists the options)\n")

    def read(self, arguments: Sequence[str] | None = None) -> dict[str, Any]:
        """The groups from `arguments` (None: the program's own).

        An error, also in the file, ends the program with one line on stderr and exit code 2.
        """
        found, rest = self.parse_known_args(arguments)
        if found.help is not None:
            (self._with_all() if found.help == "all" else self).print_help()
            self.exit()
        del found.help
        if rest:
            name = rest[0].partition("=")[0]
            known = self._flags
            plain = name.lstrip("-").replace("-", "_").lower()
            ours = flag_of(USUAL_NAMES.get(plain, plain))
            if ours in known:
                self.error(f"unknown argument {name!r}. Did you mean {ours!r}?")
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

    def _help(self, given: Any, name: str, parts: Sequence[Any]) -> str:
        """The meaning of a field with its names, and its default, except for false and none."""
        default, meaning = getattr(given, name), given.__pydantic_fields__[name].description or ""
        names = [each for part in parts if isinstance(part, Name) for each in part.names]
        if not all(each in meaning for each in names):
            meaning += f"; values: {', '.join(names)}"
        meaning = in_flags(meaning, map(type, self.groups.values()))
        if default not in (None, False, {}, ()):
            meaning += " (the default)" if default is True else f" (default: {default})"
        return meaning.replace("%", "%%")

    def _check_names(self, names: Mapping[str, Any], known: Mapping[str, Any], place: str) -> None:
        for name in (each for each in names if each not in known):
            home = next((group for group, given in self.groups.items() if name in fields_of(type(given))), None)
            hint = f"It belongs in [{home}]." if home else nearest(name, known)
            raise ConfigValueError(f"{place} {name!r}. {hint}")

    def _made(self, group: str, path: str, table: Any, flags: Mapping[str, Any]) -> Any:
        if not isinstance(table, Mapping):
            raise ConfigTypeError(f"{path}: {group}: got {shown(table)}. Accepted: a table of settings.")
        cls, values = type(self.groups[group]), {**vars(self.groups[group]), **table}
        self._check_names(table, fields_of(cls), f"{path}: {group}: unknown setting")
        set_by_flags = {name: flags[key] for name in fields_of(cls) if (key := key_of(cls, name)) in flags}
        for name, given in set_by_flags.items():
            before = values[name] or ()
            before = before if isinstance(before, (list, tuple)) else [before]
            both = [*before, *given] if isinstance(given, list) else [given]
            values[name] = both if both[1:] else both[0]

        def spelled(_: type, name: str) -> tuple[str, str]:
            from_file = name in table and name not in set_by_flags
            return (f"{path}: ", f"{group}.{name}") if from_file else ("argument ", flag_of(key_of(cls, name)))

        context = copy_context()
        context.run(spelling.set, spelled)
        return context.run(cls, **values)


def key_of(cls: type[Settings], name: str) -> str:
    """The name of a field among those of all tables."""
    return cls.of_flags if cls.of_flags and name == "enabled" else f"{cls.of_flags}_{name}".lstrip("_")


def flag_of(name: str) -> str:
    """The command-line option of a field, by its name among those of all tables."""
    return "--" + name.replace("_", "-")


def in_flags(message: str, groups: Iterable[type[Settings]]) -> str:
    """`message` with flags where it names settings as in a program: "--resume latest" for "resume='latest'".

    Messages write a setting whose name is one word as in a call, `steps=`, to distinguish it from that word.
    """
    keys = {(group.__name__, name): key_of(group, name) for group in groups for name in fields_of(group)}
    other = {f"{cls}.{name}: ": f"{key}: " for (cls, name), key in keys.items() if name != key}
    message = re.sub(r"^\w+\.\w+: ", lambda found: other.get(found[0], found[0]), message)
    names = "|".join(dict.fromkeys(keys.values()))
    several = "|".join(name for name in names.split("|") if "_" in name)
    message = re.sub(rf"^(?:\w+\.)?({names}): ", lambda found: f"argument {flag_of(found[1])}: ", message)
    message = re.sub(rf"(?<![\w'\".-])({names})=('[^']*'|\"[^\"]*\"|[\w.]*\w|)", _as_flag, message)
    return re.sub(rf"(?<![\w'\"./-])({several})(?![\w'\"./=-])", lambda found: flag_of(found[1]), message)


def _as_flag(found: re.Match[str]) -> str:
    switches = {"True": flag_of(found[1]), "False": flag_of(f"no_{found[1]}")}
    return switches.get(found[2], f"{flag_of(found[1])} {found[2].strip(QUOTES)}".rstrip())


def read_file(path: str) -> dict[str, Any]:
    """The tables of a TOML or JSON file, chosen by its suffix.

    Raises:
        ConfigValueError: the file does not exist, cannot be read, or has neither format; names the file.
    """
    kind = Path(path).suffix.lower()
    if kind not in (".toml", ".json"):
        raise ConfigValueError(f"{path}: the name ends with {kind!r}. Accepted: .toml or .json.")
    try:
        found = (toml if kind == ".toml" else json).loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # from both parsers, and for bytes that are not text
        raise ConfigValueError(f"{path}: not valid {kind[1:].upper()}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigValueError(f"{path}: got a {type(found).__name__}. Accepted: an object with one table per group.")
    return found


def _form(parts: Sequence[Any]) -> dict[str, Any]:
    """The arguments of argparse for a field of such types."""
    if bool in parts and int not in parts:
        return {"action": argparse.BooleanOptionalAction}
    kind = next((kind for kind in _WORDS if kind in parts), object)
    several = {"action": "extend", "nargs": "+"} if kind in (dict, tuple) else {"type": Word}
    return {"metavar": _WORDS.get(kind, "VALUE"), **several}
