"""Settings: frozen dataclasses that pydantic checks, with errors of one line that name a setting as it was given."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar, NoReturn

from flatfsdp.errors import ConfigTypeError, ConfigValueError, did_you_mean, shown

try:
    from pydantic import ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError
    from pydantic.dataclasses import dataclass
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the trainer needs {error.name}, which its extra installs: pip install 'flatfsdp[train]'", name=error.name
    ) from error

__all__ = ["Field", "PlainValidator", "Settings", "dataclass", "fields_of", "from_text", "setting", "spelling"]

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
    # A union complains once for each of its members.
    errors = [each for each in found if field or each["loc"][:1] == place]
    why = " Or: ".join(dict.fromkeys(str(each.get("ctx", {}).get("error", f"{each['msg']}.")) for each in errors))
    if first["type"].endswith("_type") or isinstance(reason, ConfigTypeError):
        return ConfigTypeError(f"{called}: got {shown(first['input'])}. {why}")
    return ConfigValueError(f"{called}: got {first['input']!r}. {why}")
