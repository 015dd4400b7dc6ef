"""Types of settings that pydantic lacks, or checks less strictly."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from flatfsdp.errors import ConfigTypeError, ConfigValueError, did_you_mean
from flatfsdp.trainer.settings.schema import Field, PlainValidator

__all__ = ["REFERENCE", "Count", "FilePath", "Name", "NotNegative", "Options", "Positive", "Text", "Whole", "path"]

# "package.module:name", with attributes of the name, or "package.module.name".
REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, eq=False)
class Name:
    """One of some names, in any case, with `-` for `_` if need be, or a member of an enum by its name.

    With `thing` also what is to be imported or called: "package.module:name", or from Python the thing itself.
    """

    names: Iterable[str] = ()
    thing: str = ""
    is_thing: Callable[[Any], bool] = lambda value: True
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, value: Any) -> Any:
        value = value.name if isinstance(value, Enum) else value
        things = ["'package.module:name'", f"or from Python {self.thing}"] if self.thing else []
        accepted = f"Accepted: {'' if things else 'one of '}{', '.join([*self.names, *things])}."
        if not isinstance(value, str):
            if value is None or not self.thing or not self.is_thing(value):
                raise ConfigTypeError(accepted)
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
