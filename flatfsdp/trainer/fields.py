"""The types of the trainer's settings: what each accepts, and the form that its value has then."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from flatfsdp import BackwardPrefetch
from flatfsdp.errors import ConfigTypeError, ConfigValueError
from flatfsdp.trainer.settings import Name, PlainValidator, of_several, options, path

DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
    **dict.fromkeys(("float32", "fp32", "float", "single"), torch.float32),
    **dict.fromkeys(("float64", "fp64", "double"), torch.float64),
}
"""The names of dtypes in settings."""

PACKED_DTYPES = {"int8": torch.int8, **dict.fromkeys(("fp8", "float8_e4m3fn"), torch.float8_e4m3fn)}
"""The names of dtypes in which parameters travel."""

_DTYPE_NAME, _PACKED_DTYPE_NAME = Name(tuple(DTYPES)), Name(tuple(PACKED_DTYPES))


def _dtype(value: Any) -> torch.dtype:
    return _named(value, DTYPES, _DTYPE_NAME)


def _packed_dtype(value: Any) -> torch.dtype:
    return _named(value, PACKED_DTYPES, _PACKED_DTYPE_NAME)


def _named(value: Any, dtypes: Mapping[str, torch.dtype], name: Name) -> torch.dtype:
    if isinstance(value, torch.dtype) and value in dtypes.values():
        return value
    return dtypes[name(value.lower().removeprefix("torch.") if isinstance(value, str) else value)]


def _bits(value: Any) -> int:
    bits = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(bits, bool) or bits not in (8, 4):
        raise ConfigValueError("Accepted: 8 or 4.")
    return int(bits)


def _units(value: Any) -> Any:
    accepted = (
        "Accepted: 'auto', 'none', the dotted path of a container of layers or of a module, the name of a class, "
        "a list of paths and classes, or from Python an auto_wrap_policy."
    )
    if isinstance(value, str) and "," in value:
        value = value.split(",")
    if isinstance(value, (list, tuple)) and any(isinstance(each, str) for each in value):
        for each in value:
            if not isinstance(each, str) or not re.fullmatch(r"\w+(\.\w+)*", each) or each in ("auto", "none"):
                raise ConfigValueError(f"{each!r} is not one of several. {accepted}")
        return tuple(value)
    if value is None or isinstance(value, (bool, int, float, Mapping)) or value in ([], ()):
        raise ConfigTypeError(accepted)
    if isinstance(value, str) and not re.fullmatch(r"\w+(\.\w+)*", value):
        raise ConfigValueError(accepted)
    return value


@of_several("NAME")
def _names_with_options(value: Any) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Names with options: of texts `name:key=value,key=value`, of tables with a "name", of pairs."""
    given = value if isinstance(value, (list, tuple)) else [value]
    found: list[tuple[str, dict[str, Any]]] = []
    for each in given:
        if isinstance(each, (list, tuple)) and not (len(each) == 2 and isinstance(each[1], Mapping)):
            found += _names_with_options(each)
        elif isinstance(each, (list, tuple)):
            found.append((str(each[0]), dict(each[1])))
        elif isinstance(each, Mapping) and isinstance(each.get("name"), str):
            found.append((each["name"], {key: of for key, of in each.items() if key != "name"}))
        elif isinstance(each, str) and (parts := re.fullmatch(r"([\w.]+(?::[A-Za-z_][\w.]*)?)(?::(\w+=.*))?", each)):
            pairs = re.split(r",(?=\w+=)", parts[2]) if parts[2] else []
            found.append((parts[1], options(pairs)))
        else:
            raise ConfigTypeError("Accepted: names as wandb:project=mine,mode=offline, or tables with a name.")
    return tuple(found)


def _steps(value: Any) -> tuple[int, int]:
    """The first and the last step of "10..12", "steps=10..12" or "10"."""
    if isinstance(value, (list, tuple)) and len(value) == 2:
        value = f"{value[0]}..{value[1]}"
    found = re.fullmatch(r"(?:steps=)?(\d+)(?:\.\.(\d+))?", str(value))
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise ConfigValueError("Accepted: steps as 10..12, from 1 on.")
    return first, last


def _resume(value: Any) -> str | Path:
    return value if value in ("latest", "best") else path(value)


Named = Annotated[Any, PlainValidator(_names_with_options)]
Steps = Annotated[Any, PlainValidator(_steps)]
DType = Annotated[torch.dtype | str, PlainValidator(_dtype)]
PackedDType = Annotated[torch.dtype | str, PlainValidator(_packed_dtype)]
Bits = Annotated[int, PlainValidator(_bits)]
Units = Annotated[Any, PlainValidator(_units)]
Front = Annotated[Literal["wrapper", "fully_shard"], PlainValidator(Name(("wrapper", "fully_shard")))]
Layout = Annotated[Literal["flat", "rows"], PlainValidator(Name(("flat", "rows")))]
Prefetch = Annotated[str, PlainValidator(Name(tuple(member.name.lower() for member in BackwardPrefetch)))]
DataMode = Annotated[str, PlainValidator(Name(("sharded", "dispatch")))]
SaveFormat = Annotated[str, PlainValidator(Name(("safetensors", "torch")))]
Extremum = Annotated[str, PlainValidator(Name(("min", "max")))]
Resume = Annotated[str | Path, PlainValidator(_resume)]
CheckpointPolicy = Annotated[Any, PlainValidator(Name(thing="a function", is_thing=callable))]
Module = Annotated[Any, PlainValidator(Name(thing="a module or a function", schemes=("hf",)))]
Data = Annotated[Any, PlainValidator(Name(thing="a dataset or a function", schemes=("text", "jsonl", "hf")))]
