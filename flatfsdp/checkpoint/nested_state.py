"""Nested state as a flat dict of tensors and plain values, and the form of plain values in files.

[Note: keys] A state is flattened as torch.distributed.checkpoint (DCP) does it, so that either can read the other's
files: mappings always, lists where they hold mappings or tensors; and tuples that hold tensors. A leaf's key is its
path joined by dots. As names of parameters hold dots themselves, the path is stored, too.
"""

from __future__ import annotations

import base64
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from ..engine.base.plain_data import READ, JsonWriter
from ..errors import ConfigTypeError, ConfigValueError

# A key of a mapping, or an index of a list as (index,).
Step: TypeAlias = "str | int | tuple[int]"
Path: TypeAlias = tuple[Step, ...]


def flatten(state: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Leaves and paths of a nested state, by key.

    Raises:
        ConfigTypeError: a key of a mapping that is neither a str nor an int.
        ConfigValueError: two leaves of one key.
    """
    leaves: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    _collect(state, (), leaves, paths)
    return leaves, paths


def _collect(value: Any, path: Path, leaves: dict[str, Any], paths: dict[str, Path]) -> None:
    if isinstance(value, Mapping) and (_is_open(value) or not path):
        for key, inner in value.items():
            if not _is_key(key):
                raise ConfigTypeError(f"{shown(path) or 'state'}: got the key {key!r}. Accepted: strings and integers.")
            _collect(inner, (*path, key), leaves, paths)
    elif isinstance(value, list | tuple) and _is_open(value):
        for index, inner in enumerate(value):
            _collect(inner, (*path, (index,)), leaves, paths)
    else:
        key = shown(path)
        if key in leaves:
            raise ConfigValueError(f"state: two values have the key {key!r}; rename one of them")
        leaves[key], paths[key] = value, path


def _is_open(value: Any) -> bool:
    if isinstance(value, Counter):
        return False
    if isinstance(value, Mapping):
        return bool(value) and (all(map(_is_key, value)) or any(map(_holds_tensors, value.values())))
    if isinstance(value, list):
        return any(isinstance(inner, torch.Tensor | Mapping) or _is_open(inner) for inner in value)
    return isinstance(value, tuple) and any(map(_holds_tensors, value))


def _is_key(key: Any) -> bool:
    return type(key) in (str, int)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return any(map(_holds_tensors, value)) if isinstance(value, list | tuple) else isinstance(value, torch.Tensor)


def shown(path: Path) -> str:
    """The key of a path."""
    return ".".join(str(_plain(step)) for step in path)


def plain(path: Path) -> tuple[str | int, ...]:
    """The keys and indices of a path, as users write them."""
    return tuple(map(_plain, path))


class _List(dict[int, Any]):
    """A list whose elements are added in any order."""


def unflatten(leaves: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[Any, Any]:
    """The nested state of `leaves`; tuples that held tensors become lists."""
    root: dict[Any, Any] = {}
    for key, leaf in leaves.items():
        path, inside = paths[key], root
        for step, following in itertools.pairwise(path):
            inside = inside.setdefault(_plain(step), _List() if isinstance(following, tuple) else {})
        inside[_plain(path[-1])] = leaf
    whole: dict[Any, Any] = _with_lists(root)
    return whole


def _plain(step: Step) -> str | int:
    return step[0] if isinstance(step, tuple) else step


def _with_lists(value: Any) -> Any:
    if isinstance(value, _List):
        return [_with_lists(value[index]) for index in sorted(value)]
    return {key: _with_lists(inner) for key, inner in value.items()} if type(value) is dict else value


class _Writer(JsonWriter):
    def other(self, value: Any, path: tuple[object, ...]) -> Any:
        if type(value) in (bytes, bytearray):
            return {"bytes": base64.b64encode(value).decode()}
        if type(value) is torch.Size:
            return self.node(tuple(value), path)
        item = getattr(value, "item", None)
        if callable(item) and getattr(value, "shape", None) == ():
            return self.node(item(), path)  # a numpy scalar
        where, *keys = path
        raise ConfigTypeError(
            f"{where}{''.join(f'[{key!r}]' for key in keys)}: got a value of type {type(value).__name__}. Accepted: "
            "tensors, None, bool, int, float, complex, str, bytes, torch.dtype, and lists, tuples and dicts of them. A "
            "checkpoint holds nothing that must be executed to be read; save the object's state_dict() or its fields "
            "instead."
        )


def encode(value: Any, where: str) -> Any:
    """`value` in a form that JSON can hold ([Note: plain data]); `where` names it in errors.

    Raises:
        ConfigTypeError: a value that only a pickle could hold.
    """
    return _Writer().node(value, (where,))


def decode(value: Any) -> Any:
    """Invert `encode`.

    Raises:
        ValueError, TypeError: `value` is not a result of `encode`.
    """
    if isinstance(value, list):
        return [decode(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    ((tag, contents),) = value.items()
    if tag == "bytes":
        return base64.b64decode(contents, validate=True)
    if tag not in READ:
        raise ValueError(f"an object is of an unknown tag, {tag!r}")
    return READ[tag](decode(contents))
