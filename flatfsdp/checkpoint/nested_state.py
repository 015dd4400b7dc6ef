"""Nested state as a flat dict of tensors and plain values, and a lossless JSON form of plain values.

[Note: keys] A state is flattened as torch.distributed.checkpoint (DCP) does it, so that either can read the other's
files: mappings always, lists where they hold mappings or tensors; and tuples that hold tensors. A leaf's key is its
path joined by dots. As names of parameters hold dots themselves, the path is stored, too.
"""

from __future__ import annotations

import base64
import itertools
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from ..errors import ConfigTypeError, ConfigValueError
from .tensor_bytes import dtype_named

# A key of a mapping, or a place in a list as (place,).
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
        for place, inner in enumerate(value):
            _collect(inner, (*path, (place,)), leaves, paths)
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
    """The keys and places of a path, as users write them."""
    return tuple(map(_plain, path))


class _List(dict[int, Any]):
    """A list whose elements are added in any order."""


def unflatten(leaves: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[Any, Any]:
    """The nested state of `leaves`; tuples that held tensors become lists."""
    root: dict[Any, Any] = {}
    for key, leaf in leaves.items():
        path, holder = paths[key], root
        for step, following in itertools.pairwise(path):
            holder = holder.setdefault(_plain(step), _List() if isinstance(following, tuple) else {})
        holder[_plain(path[-1])] = leaf
    whole: dict[Any, Any] = _with_lists(root)
    return whole


def _plain(step: Step) -> str | int:
    return step[0] if isinstance(step, tuple) else step


def _with_lists(value: Any) -> Any:
    if isinstance(value, _List):
        return [_with_lists(value[place]) for place in sorted(value)]
    return {key: _with_lists(inner) for key, inner in value.items()} if type(value) is dict else value


# JSON has no tuples, no bytes, and only strings as keys: such values become an object with one key, their kind.
_DICT, _TUPLE, _BYTES, _COMPLEX, _DTYPE = "dict", "tuple", "bytes", "complex", "dtype"
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {_DICT: dict, "OrderedDict": OrderedDict, "Counter": Counter}


def encode(value: Any, where: str) -> Any:
    """`value` in a form that JSON can hold; `where` names it in errors.

    Raises:
        ConfigTypeError: a value that only a pickle could hold.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(inner, f"{where}[{place}]") for place, inner in enumerate(value)]
    if type(value) in (tuple, torch.Size):
        return {_TUPLE: [encode(inner, f"{where}[{place}]") for place, inner in enumerate(value)]}
    if type(value) in (bytes, bytearray):
        return {_BYTES: base64.b64encode(value).decode()}
    if type(value) is complex:
        return {_COMPLEX: [value.real, value.imag]}
    if type(value) is torch.dtype:
        return {_DTYPE: str(value).removeprefix("torch.")}
    for name, kind in _MAPPINGS.items():
        if type(value) is kind:
            pairs = [[encode(key, where), encode(inner, f"{where}[{key!r}]")] for key, inner in value.items()]
            return {name: pairs}
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        return encode(item(), where)  # a numpy scalar
    raise ConfigTypeError(
        f"{where}: got a value of type {type(value).__name__}. Accepted: tensors, None, bool, int, float, complex, "
        "str, bytes, torch.dtype, and lists, tuples and dicts of them. A checkpoint holds nothing that must be "
        "executed to be read; save the object's state_dict() or its fields instead."
    )


def decode(value: Any) -> Any:
    """Invert `encode`.

    Raises:
        ValueError, TypeError: `value` is not a result of `encode`.
    """
    if isinstance(value, list):
        return [decode(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"an object has {len(value)} keys")
    ((name, content),) = value.items()
    if name == _TUPLE and isinstance(content, list):
        return tuple(decode(inner) for inner in content)
    if name == _BYTES:
        return base64.b64decode(content, validate=True)
    if name == _COMPLEX:
        return complex(*content)
    if name == _DTYPE and isinstance(content, str):
        return dtype_named(content)
    if name not in _MAPPINGS or not isinstance(content, list):
        raise ValueError(f"an object is of an unknown kind, {name!r}")
    return _MAPPINGS[name]({decode(key): decode(inner) for key, inner in content})
