"""Maps over the tensors of nested arguments and outputs: tuples, named tuples, lists, mappings, dataclasses.

A container in which nothing changed is returned itself, which preserves its identity. Objects of other types (for
example of a user-defined class that is not a dataclass) are opaque: tensors in them are ignored. Containers may contain
themselves, as nodes of a tree that refer to their parents do.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ...errors import UsageError
from ._functorch import inside

Known = dict[int, tuple[Any, Any]]  # containers and what becomes of them, by their ids


def map_tensors(
    change: Callable[[torch.Tensor], torch.Tensor],
    tree: Any,
    *,
    in_place: Container[int] = (),
    known: Known | None = None,
) -> Any:
    """`tree` with `change` applied to every tensor in it. Containers whose ids are in `in_place` are written to, others
    are copied. `known`: what becomes of containers; those that are found are added.

    Raises:
        UsageError: a container with a tensor that changes can be neither written to nor copied.
    """
    if isinstance(tree, torch.Tensor):
        return change(tree)
    return _Map(change, in_place, {} if known is None else known).of(tree)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Every tensor in `tree`, in order; with repetitions, except of those in a container that is found again."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    _collect(tree, found, {})
    return found


def containers_in(tree: Any) -> dict[int, Any]:
    """The containers in `tree`, except tuples, by their ids."""
    return survey((tree,))[1]


def survey(trees: Iterable[Any]) -> tuple[list[torch.Tensor], dict[int, Any]]:
    """The tensors and the containers in all of `trees`, as `tensors_in` and `containers_in` return them."""
    tensors: list[torch.Tensor] = []
    containers: dict[int, Any] = {}
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            tensors.append(tree)
        else:
            _collect(tree, tensors, containers)
    return tensors, containers


def _collect(tree: Any, tensors: list[torch.Tensor], containers: dict[int, Any]) -> None:
    """Add to `tensors` those in `tree`, and to `containers` the ones that are no tuples."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
    elif isinstance(tree, tuple):
        for item in tree:
            if isinstance(item, torch.Tensor):
                tensors.append(item)
            else:
                _collect(item, tensors, containers)
    elif id(tree) not in containers and _is_container(tree):
        containers[id(tree)] = tree
        for _, value in _entries(tree):
            _collect(value, tensors, containers)


def _is_container(tree: Any) -> bool:
    """Whether it is one with entries that can be replaced, which tuples have not."""
    # Mapping last: instance checks of abstract classes are slow.
    return isinstance(tree, (list, dict, collections.deque, Mapping)) or _is_dataclass(tree)


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _entries(tree: Any) -> Iterable[tuple[Any, Any]]:
    """The keys and values of a container that is no tuple."""
    if isinstance(tree, (list, collections.deque)):
        return enumerate(tree)
    return tree.items() if isinstance(tree, Mapping) else _fields(tree)


def _fields(tree: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(tree):
        try:
            yield field.name, getattr(tree, field.name)
        except AttributeError:  # not set yet
            continue


class _Map:
    """One map over a tree."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor], in_place: Container[int], known: Known) -> None:
        self._change = change
        self._in_place = in_place
        self._known = known

    def of(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return self._change(tree)
        is_tuple = isinstance(tree, tuple)
        if not (is_tuple or _is_container(tree)):
            return tree
        if (known := self._known.get(id(tree))) is not None:
            return known[1]
        if is_tuple:
            made = self._of_tuple(tree)
        else:
            self._known[id(tree)] = tree, tree  # it may contain itself
            # A list, because the container may be written to meanwhile.
            changed = [(key, new) for key, value in [*_entries(tree)] if (new := self.of(value)) is not value]
            written = not changed or (id(tree) in self._in_place and _write(tree, changed))
            made = tree if written else _copied(tree, changed)
        self._known[id(tree)] = tree, made
        return made

    def _of_tuple(self, tree: tuple[Any, ...]) -> tuple[Any, ...]:
        items = [self.of(item) for item in tree]
        if isinstance(tree, PackedSequence):
            items[1] = tree.batch_sizes  # recurrent modules need them on the CPU
        return tree if all(new is old for new, old in zip(items, tree, strict=True)) else _tuple_like(tree, items)


def _tuple_like(tree: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    try:
        made = tuple.__new__(type(tree), items)  # not its constructor, which may have parameters of its own
    except TypeError:  # those that torch returns, for example of `max`
        return type(tree)(items)
    if attributes := getattr(tree, "__dict__", None):
        made.__dict__.update(attributes)
    return made


def _write(tree: Any, changed: list[tuple[Any, Any]]) -> bool:
    """Replace entries of `tree`; False, and nothing replaced, if it cannot be written to."""
    if _is_dataclass(tree) and not isinstance(tree, Mapping) and tree.__dataclass_params__.frozen:
        return False
    values = dict(_entries(tree))
    before = [(key, values[key]) for key, _ in changed]
    try:
        for key, new in changed:
            _set(tree, key, new)
        values = dict(_entries(tree))
        if all(values[key] is new for key, new in changed):
            return True
    except Exception:  # of a method that a user has written: for example a mapping that is read-only
        pass
    for key, old in before:
        try:
            _set(tree, key, old)
        except Exception:
            break
    return False


def _set(tree: Any, key: Any, value: Any) -> None:
    if isinstance(tree, (list, collections.deque, Mapping)):
        tree[key] = value  # type: ignore[index]
    else:
        object.__setattr__(tree, key, value)


def _copied(tree: Any, changed: list[tuple[Any, Any]]) -> Any:
    """A copy of `tree` with other entries."""
    entries = {**dict(_entries(tree)), **dict(changed)}
    if isinstance(tree, MappingProxyType):
        return MappingProxyType(entries)
    try:
        twin = copy.copy(tree)
        for key, new in changed:
            _set_by_force(twin, key, new)
        return twin
    except Exception:
        try:
            return type(tree)(entries if isinstance(tree, Mapping) else list(entries.values()))
        except Exception as error:
            raise UsageError(
                f"a {type(tree).__name__} among the arguments or the outputs of a forward contains a tensor that has "
                "to be cast or moved to another device, but the container can be neither modified nor copied "
                f"({error}). Pass a tuple, list, dict or dataclass instead, or a tensor that already has the right "
                "dtype and device"
            ) from error


def _set_by_force(twin: Any, key: Any, value: Any) -> None:
    """Replace an entry of a copy, also where the class forbids it."""
    try:
        _set(twin, key, value)
    except Exception:
        if isinstance(twin, list):
            list.__setitem__(twin, key, value)
        elif isinstance(twin, dict):
            dict.__setitem__(twin, key, value)
        else:
            raise


def cast_floating(tree: Any, dtype: torch.dtype, *, in_place: Container[int] = ()) -> Any:
    """`tree` with its floating-point tensors in `dtype`; differentiable. `in_place`: as of `map_tensors`."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return inside(tensor.to, dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast, tree, in_place=in_place)
