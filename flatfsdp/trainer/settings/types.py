"""The types of the trainer's settings: their accepted values, and their normal form."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, Field, Json, PlainValidator, TypeAdapter

from flatfsdp import BackwardPrefetch
from flatfsdp.errors import ConfigTypeError, ConfigValueError, did_you_mean
from flatfsdp.trainer.settings.references import REFERENCE

DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
    **dict.fromkeys(("float32", "fp32", "float", "single"), torch.float32),
    **dict.fromkeys(("float64", "fp64", "double"), torch.float64),
}
"""The names of dtypes in settings."""

PACKED_DTYPES = {"int8": torch.int8, **dict.fromkeys(("fp8", "float8_e4m3fn"), torch.float8_e4m3fn)}
"""The names of dtypes in which parameters are gathered."""

_JSON: TypeAdapter[Any] = TypeAdapter(Annotated[Json[Any] | Any, Field(union_mode="left_to_right")])  # or plain text
_DOTTED = re.compile(r"\w+(\.\w+)*")


def as_text(value: Any) -> Any:
    """A member of an enum, a dtype or a path under its name in settings; other values unchanged."""
    if isinstance(value, Enum):
        return value.name
    return str(value).removeprefix("torch.") if isinstance(value, (torch.dtype, Path)) else value


@dataclasses.dataclass(frozen=True, eq=False)
class Name:
    """One of some names, in any letter case, with `-` for `_` if needed, or a value that `as_text` converts to one.

    With `thing`, also an object to import or call: "package.module:name", or from Python the object itself; and with
    `schemes`, also a text that begins with one of them and a colon.
    """

    names: Iterable[str] = ()
    thing: str = ""
    is_thing: Callable[[Any], bool] = lambda value: True
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    schemes: tuple[str, ...] = ()
    prefix: str = ""  # that names may have

    def __call__(self, value: Any) -> Any:
        things = ["'package.module:name'", f"or (in Python) {self.thing}"] if self.thing else []
        things = [*(f"'{scheme}:...'" for scheme in self.schemes), *things]
        accepted = f"Accepted: {'' if things else 'one of '}{', '.join([*self.names, *things])}."
        text = as_text(value) if not isinstance(value, Path) else value
        word = str(text).lower() if isinstance(text, str | int) else ""
        found = word.removeprefix(self.prefix).replace("-", "_").strip("_")
        if found in self.names:
            return found
        if not isinstance(text, str):
            if value is None or isinstance(value, Path) or not self.thing or not self.is_thing(value):
                raise ConfigTypeError(accepted)
            return value
        scheme, _, rest = text.partition(":")
        if (scheme in self.schemes and rest) or (self.thing and REFERENCE.fullmatch(text)):
            return text
        raise ConfigValueError(f"{accepted} {self.reasons.get(found) or did_you_mean(found, self.names)}".rstrip())


def path(value: Any) -> Path:
    """A path, also from text."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ConfigTypeError("Accepted: a path.")
    return Path(value)


def options(value: Any) -> dict[str, Any]:
    """Names and values, also from a list of tables and texts (`key=value`, JSON objects), where later ones override."""
    found: dict[str, Any] = {}
    for each in value if isinstance(value, list) else [value]:
        pair = re.fullmatch(r"\s*([^={\s][^=]*)=(.*)", each, re.DOTALL) if isinstance(each, str) else None
        table = {pair[1]: _JSON.validate_python(pair[2])} if pair else _JSON.validate_python(each)
        if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table):
            raise ConfigTypeError("Accepted: a table of names and values, key=value, or a JSON object.")
        found |= table
    return found


def separate(text: str) -> list[str]:
    """The parts of `key=value,key=value`, where values may contain commas."""
    return re.split(r",(?=\w+=)", text)


def _units(value: Any) -> Any:
    accepted = (
        "Accepted: 'auto', 'none', the dotted path of a container of layers or of a module, the name of a class, "
        "a list of paths and classes, or (in Python) an auto_wrap_policy."
    )
    match value:
        case str() if "," in value:
            return _units(value.split(","))
        case [*several] if any(isinstance(each, str) for each in several):
            for each in several:
                if not isinstance(each, str) or not _DOTTED.fullmatch(each) or each in ("auto", "none"):
                    raise ConfigValueError(f"{each!r} cannot be in a list. {accepted}")
            return tuple(several)
        case str() if not _DOTTED.fullmatch(value):
            raise ConfigValueError(accepted)
        case None | bool() | int() | float() | Mapping() | []:
            raise ConfigTypeError(accepted)
    return value


def _name_with_options(value: Any) -> tuple[str, dict[str, Any]]:
    """Read a text `name:key=value,key=value`, a table with a "name", or a pair."""
    match value:
        case {"name": str(name)}:
            return name, {key: each for key, each in value.items() if key != "name"}
        case [str(name), Mapping() as given]:
            return name, dict(given)
        case str() if parts := re.fullmatch(r"([\w.]+(?::[A-Za-z_][\w.]*)?)(?::(\w+=.*))?", value):
            return parts[1], options(separate(parts[2]) if parts[2] else [])
    raise ConfigTypeError("Accepted: names, with options as in wandb:project=mine,mode=offline, or tables with a name.")


def _steps(value: Any) -> tuple[int, int]:
    """The first and the last step of "10..12", "steps=10..12" or "10"."""
    if isinstance(value, (list, tuple)) and len(value) == 2:
        value = f"{value[0]}..{value[1]}"
    found = re.fullmatch(r"(?:steps=)?(\d+)(?:\.\.(\d+))?", str(value))
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise ConfigValueError("Accepted: steps such as 10..12, counted from 1.")
    return first, last


Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
FilePath = Annotated[Path, PlainValidator(path)]
Resume = Literal["latest", "best"] | FilePath
Options = Annotated[dict[str, Any], PlainValidator(options)]
Named = Annotated[
    tuple[Annotated[tuple[str, dict[str, Any]], PlainValidator(_name_with_options)], ...],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, (list, tuple)) else (value,)),
]
Steps = Annotated[Any, PlainValidator(_steps)]
DType = Annotated[torch.dtype | str, PlainValidator(Name(DTYPES, prefix="torch.")), AfterValidator(DTYPES.get)]
PackedDType = Annotated[
    torch.dtype | str, PlainValidator(Name(PACKED_DTYPES, prefix="torch.")), AfterValidator(PACKED_DTYPES.get)
]
Bits = Annotated[int, PlainValidator(Name(("8", "4"))), AfterValidator(int)]
Units = Annotated[Any, PlainValidator(_units)]
Front = Annotated[Literal["wrapper", "fully_shard"], PlainValidator(Name(("wrapper", "fully_shard")))]
Layout = Annotated[Literal["flat", "rows"], PlainValidator(Name(("flat", "rows")))]
Prefetch = Annotated[str, PlainValidator(Name(tuple(member.name.lower() for member in BackwardPrefetch)))]
DataMode = Annotated[str, PlainValidator(Name(("sharded", "dispatch")))]
SaveFormat = Annotated[str, PlainValidator(Name(("safetensors", "torch")))]
Extremum = Annotated[str, PlainValidator(Name(("min", "max")))]
CheckpointPolicy = Annotated[Any, PlainValidator(Name(thing="a function", is_thing=callable))]
Module = Annotated[Any, PlainValidator(Name(thing="a module or a function", schemes=("hf",)))]
Data = Annotated[Any, PlainValidator(Name(thing="a dataset or a function", schemes=("text", "jsonl", "hf")))]
