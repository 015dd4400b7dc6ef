"""Maps over the tensors of nested arguments and outputs: tuples, named tuples, lists, mappings, dataclasses.

A container in which nothing changed is returned itself, which preserves its identity. Objects of other types (for
example of a user-defined class that is not a dataclass) are opaque: tensors in them are ignored.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ._functorch import inside


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """`tree` with `change` applied to every tensor in it."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(change, item) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        if hasattr(tree, "_fields"):  # a named tuple takes its items as separate arguments
            return type(tree)(*items)
        return type(tree)(items)
    if isinstance(tree, Mapping):
        entries = {key: map_tensors(change, value) for key, value in tree.items()}
        if all(entries[key] is value for key, value in tree.items()):
            return tree
        changed: Any = copy.copy(tree)
        for key, value in entries.items():
            changed[key] = value
        return changed
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        values = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if hasattr(tree, f.name)}
        new_values = {name: map_tensors(change, value) for name, value in values.items()}
        if all(new_values[name] is value for name, value in values.items()):
            return tree
        twin = copy.copy(tree)
        for name, value in new_values.items():
            object.__setattr__(twin, name, value)
        return twin
    return tree


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Every tensor in `tree`, in order, with repetitions."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            if isinstance(item, torch.Tensor):
                found.append(item)
            else:
                _collect(item, found)
    elif isinstance(tree, (dict, Mapping)):  # dict first: instance checks of abstract classes are slow
        for value in tree.values():
            _collect(value, found)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            _collect(getattr(tree, field.name, None), found)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with its floating-point tensors in `dtype`; differentiable."""
    return map_tensors(lambda t: inside(t.to, dtype) if t.is_floating_point() and t.dtype != dtype else t, tree)


def move(tree: Any, device: torch.device) -> Any:
    """`tree` with its tensors on `device`. The caller may overwrite the originals at once, even pinned ones."""
    return map_tensors(lambda t: t if t.device == device else inside(t.to, device), tree)
