"""The places in modules for the parameters of one handle, which differ at rest and in computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from operator import is_not
from typing import Any, NamedTuple

from torch import nn

from ..flat.param_refs import ParamRef


class _Contents(NamedTuple):
    """Contents of places: by place; and by module's dictionary, for one update of all of its places."""

    held: list[nn.Parameter]
    by_module: list[dict[str, nn.Parameter]]


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """Places that are updated without a call of a Python function for each.

    Attributes:
        held: the present object of each; the dictionary of each, its key there, and the index of its parameter.
        modules: each dictionary once.
        at_rest, computing: their contents.
        others: places in modules with their own method for setting a parameter, such as recurrent ones.
    """

    held: list[nn.Parameter]
    dictionaries: list[dict[str, Any]]
    names: list[str]
    indices: list[int]
    modules: list[dict[str, Any]]
    at_rest: _Contents
    computing: _Contents
    others: list[tuple[ParamRef, int]]


class ModulePlaces:
    """Places in modules, and their contents: `leaves` while a unit computes, else `holders`. They change together, four
    times in a step."""

    def __init__(self, leaves: Sequence[nn.Parameter], holders: Sequence[nn.Parameter]) -> None:
        self._leaves, self._holders = leaves, holders
        self._places: list[tuple[ParamRef, int]] = []
        self._slots: _Slots | None = None
        self._computing: bool | None = None  # the argument of the last `show`

    def add(self, param_ref: ParamRef, index: int) -> None:
        """Add `param_ref` as a place of parameter `index`; it may be known already."""
        self._slots = None  # its module may have another dictionary now
        if not any(param_ref is each for each, _ in self._places):
            self._places.append((param_ref, index))
            param_ref.keeps_place = True

    def remove(self, param_ref: ParamRef) -> None:
        """Remove `param_ref`, which is a place of none of these parameters any more."""
        self._slots = None
        self._places = [each for each in self._places if each[0] is not param_ref]
        param_ref.hold_in([param_ref.held], 0)

    def forget(self) -> None:
        """Rebuild the contents: another parameter is among the holders."""
        self._slots = None

    def show(self, *, computing: bool) -> None:
        """Let modules hold the leaves, or the holders, unless they do already."""
        if computing is self._computing:
            return
        self._computing = computing
        slots = self._slots or self._found()
        slots.held[:], by_module = slots.computing if computing else slots.at_rest
        deque(map(dict.update, slots.modules, by_module), 0)
        parameters = self._leaves if computing else self._holders
        for param_ref, index in slots.others:
            param_ref.hold(parameters[index])

    def displaced(self) -> set[int]:
        """The indices of parameters in whose places modules hold other objects than the last shown. Modules with their
        own method for setting parameters are left out."""
        slots = self._slots
        if slots is None or self._computing is None:
            return set()
        found = map(dict.get, slots.dictionaries, slots.names)
        others = map(is_not, found, slots.held)
        return set(compress(slots.indices, others))

    def _found(self) -> _Slots:
        refs, held = list[ParamRef](), list[nn.Parameter]()
        dictionaries, indices, others = list[dict[str, Any]](), list[int](), []
        for param_ref, index in self._places:
            module = param_ref.module_ref()
            if module is None or type(module).__setattr__ is not nn.Module.__setattr__:
                others.append((param_ref, index))
                continue
            refs.append(param_ref)
            held.append(param_ref.held)
            dictionaries.append(module._parameters)
            indices.append(index)
        for number, param_ref in enumerate(refs):
            param_ref.hold_in(held, number)
        names = [param_ref.attribute for param_ref in refs]
        modules = list({id(each): each for each in dictionaries}.values())

        def contents(parameters: Sequence[nn.Parameter]) -> _Contents:
            shown = [parameters[index] for index in indices]
            taken: dict[int, dict[str, nn.Parameter]] = {id(each): {} for each in modules}
            for dictionary, name, parameter in zip(dictionaries, names, shown, strict=True):
                taken[id(dictionary)][name] = parameter
            return _Contents(shown, list(taken.values()))

        at_rest, computing = contents(self._holders), contents(self._leaves)
        self._slots = _Slots(held, dictionaries, names, indices, modules, at_rest, computing, others)
        return self._slots
