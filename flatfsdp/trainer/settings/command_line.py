"""Settings from a command line: every field is a flag, over what a file says, over the defaults."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from typing import Any, NoReturn

from flatfsdp.errors import ConfigTypeError, ConfigValueError, did_you_mean
from flatfsdp.trainer.settings.kinds import Flag, FlagOrCount, Name, Table
from flatfsdp.trainer.settings.tables import (
    Called,
    Setting,
    build,
    calling,
    check_tables,
    flag_of,
    read_file,
    settings_of,
)

__all__ = ["Parser", "add_to_parser", "make_parser", "parse"]


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line; the usage is a `--help` away.

    Attributes:
        groups: the dataclasses of settings that it reads, by the name of their group, or instances with other defaults.
    """

    def __init__(self, prog: str, *, groups: Mapping[str, Any], description: str | None = None) -> None:
        super().__init__(prog=prog, usage="%(prog)s [options]", description=description, allow_abbrev=False)
        self.groups = groups

    def error(self, message: str) -> NoReturn:
        """Print `message` as one line on stderr and exit with code 2."""
        name = self.prog.removeprefix("python -m ")
        print(f"{name}: {' '.join(message.split())} (--help lists the options)", file=sys.stderr)
        raise SystemExit(2)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As of `argparse`; an option that there is not is answered with the nearest one."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            name = rest[0].partition("=")[0]
            flags = re.findall(r"--[\w-]+", self.format_help())
            longer = [flag for flag in flags if name.startswith("--") and flag.startswith(name)]
            hint = did_you_mean(name, longer[:1] or flags)
            self.error(f"unknown argument {name!r}.{hint and ' ' + hint}")
        return found


def make_parser(prog: str, *, groups: Mapping[str, Any], description: str | None = None) -> Parser:
    """A parser with `--config FILE` and a flag for every field of `groups`.

    Args:
        prog: the program, such as "python -m flatfsdp.train".
        groups: dataclasses of settings by the name of their table in a file, which heads their part of the help; or
            instances of them, whose values are the defaults then.
        description: what the program does.

    Raises:
        ConfigValueError: two groups have fields of one name, hence one flag.
    """
    parser = Parser(prog, groups=groups, description=description)
    tables = ", ".join(f"[{name}]" for name in groups)
    parser.add_argument("--config", metavar="FILE", help=f"TOML or JSON with {tables}; flags count over it")
    taken: dict[str, str] = {}
    for name, group in groups.items():
        for each in settings_of(_class_of(group)):
            if each.flag in taken:
                raise ConfigValueError(f"groups: {each.flag} would be a flag of {taken[each.flag]!r} and of {name!r}")
            taken[each.flag] = name
        add_to_parser(parser, group, name=name)
    return parser


def add_to_parser(parser: argparse.ArgumentParser, group: Any, *, name: str) -> None:
    """Add the flags of a dataclass of settings, or of an instance with other defaults, as the group `name`."""
    cls = _class_of(group)
    summary = (cls.__doc__ or "").partition("\n")[0]
    flags = parser.add_argument_group(name, summary)
    for each in settings_of(cls):
        default = each.default if isinstance(group, type) else getattr(group, each.name)
        settings: dict[str, Any] = {"metavar": each.kind.metavar}
        if isinstance(each.kind, Flag) and not isinstance(each.kind, FlagOrCount):
            settings = {"action": argparse.BooleanOptionalAction}
        elif isinstance(each.kind, Table):
            settings |= {"action": "extend", "nargs": "+"}
        # No defaults: what was not given is not in the namespace, so that a file can say it.
        flags.add_argument(
            each.flag, dest=f"{name}.{each.name}", default=argparse.SUPPRESS, help=_help(each, default), **settings
        )


def parse(parser: Parser, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The groups of `parser`, each as its dataclass, from `arguments` (None: the program's own).

    What is wrong, also in the file, ends the program by one line on stderr and exit code 2. Arguments that were added
    to `parser` besides stand in the result under their own names.
    """
    found = vars(parser.parse_args(arguments))
    path = found.pop("config")
    classes = {name: _class_of(group) for name, group in parser.groups.items()}
    try:
        tables = {} if path is None else read_file(path)
        check_tables(classes, tables, where=str(path))
        for name, group in parser.groups.items():
            flags = {
                each.name: found.pop(f"{name}.{each.name}")
                for each in settings_of(classes[name])
                if f"{name}.{each.name}" in found
            }
            found[name] = _merged(group, name=name, file=str(path), table=tables.get(name, {}), flags=flags)
    except (ConfigTypeError, ConfigValueError) as error:
        parser.error(str(error))
    return found


def _merged(group: Any, *, name: str, file: str, table: Mapping[str, Any], flags: Mapping[str, Any]) -> Any:
    """One group of settings: flags over the file's table over the defaults."""
    cls = _class_of(group)

    def spelling(_: type, field: str) -> Called:
        if field in table and field not in flags:
            return Called(f"{name}.{field}", f"{file}: ")
        return Called(flag_of(field), "argument ")

    with calling(spelling):
        values = {} if isinstance(group, type) else {each.name: getattr(group, each.name) for each in settings_of(cls)}
        values |= table
        for each in settings_of(cls):
            if each.name in flags:
                values[each.name] = _read(each, str(spelling(cls, each.name)), flags[each.name], values.get(each.name))
        return build(cls, values)


def _read(each: Setting, name: str, given: Any, below: Any) -> Any:
    """The value of a flag; of a table each key counts over the same one `below`."""
    if isinstance(each.kind, Table):
        merged = dict(below or {})
        for text in given:
            merged |= each.kind.read(name, text)
        return merged
    return each.read(name, given) if isinstance(given, str) else given


def _class_of(group: Any) -> type:
    return group if isinstance(group, type) else type(group)


def _help(each: Setting, default: Any) -> str:
    """The help of a setting with its names, and its default where that is worth a word: false and none are not."""
    names = each.kind.names if isinstance(each.kind, Name) else ()
    told = each.help if all(name in each.help for name in names) else f"{each.help}: {', '.join(names)}"
    if default is MISSING:
        told += " (must be given)"
    elif default is True:
        told += " (the default)"
    elif default is not None and default is not False and default != {}:
        told += f" (default: {each.kind.plain(default)})"
    return told.replace("%", "%%")
