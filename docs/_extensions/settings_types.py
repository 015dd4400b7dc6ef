"""Shows settings in the reference with the types that a program may give them, without the validators behind them."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from sphinx.application import Sphinx

from flatfsdp.trainer import Run, StepReport, TrainingResult
from flatfsdp.trainer.settings import Settings
from flatfsdp.trainer.settings.types import Name, Named, Steps, Units

WRITTEN = {
    Named: "str | list[str]",
    Steps: "str",
    Units: "str | list[str] | Callable",
}
"""Types whose values are texts of a form of their own."""

MADE_BY_THE_TRAINER = (Run, StepReport, TrainingResult)


def type_in_words(annotation: Any) -> str:
    """A type as a program would write it."""
    if (written := next((text for kind, text in WRITTEN.items() if annotation is kind), None)) is not None:
        return written
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        if parts[0] is not Any:
            return type_in_words(parts[0])
        names = [each.func for each in parts[1:] if isinstance(getattr(each, "func", None), Name)]
        return "str | Callable" if any(name.is_thing is callable for name in names) else "Any"
    if origin in (typing.Union, types.UnionType):
        words = dict.fromkeys(word for part in parts for word in type_in_words(part).split(" | "))
        return "Any" if "Any" in words else " | ".join(words)
    if annotation is type(None):
        return "None"
    if origin is not None or not isinstance(annotation, type):
        return str(annotation).replace("typing.", "")
    return "str | Path" if annotation is Path else inspect.formatannotation(annotation)


def signature_of(settings: type[Settings]) -> str:
    """The signature of a class of settings."""
    hints = typing.get_type_hints(settings, include_extras=True)
    parts, named_only = [], False
    for name, parameter in inspect.signature(settings).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not named_only:
            parts.append("*")
            named_only = True
        default = parameter.default
        given = "" if default is parameter.empty else f" = {str(default)!r}" if _is_path(default) else f" = {default!r}"
        parts.append(f"{name}: {type_in_words(hints[name])}{given}")
    return f"({', '.join(parts)})"


def _is_path(value: object) -> bool:
    return hasattr(value, "__fspath__")


def readable(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """The signature of a class of settings instead of autodoc's; none for classes that only the trainer makes."""
    if obj in MADE_BY_THE_TRAINER:
        return "", None
    if isinstance(obj, type) and issubclass(obj, Settings):
        return signature_of(obj), None
    return signature, returns


def with_meanings(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Adds the meaning of each field to the description of a class of settings."""
    if isinstance(obj, type) and issubclass(obj, Settings) and obj is not Settings:
        fields: Any = obj.__dict__.get("__pydantic_fields__", {})
        lines += ["", *(f":param {field}: {each.description}" for field, each in fields.items()), ""]


def setup(app: Sphinx) -> dict[str, bool]:
    connect: Callable[..., Any] = app.connect
    connect("autodoc-process-signature", readable)
    connect("autodoc-process-docstring", with_meanings)
    return {"parallel_read_safe": True}
