"""Where modules hold the parameters of one handle: at rest others than they compute with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import is_not
from typing import Any

from torch import nn

from ..flat.param_refs import ParamRef


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """Places that take what they are to hold without a call of a Python function for each.

    Attributes:
        refs: these, the dictionary of each, its key there, and which parameter it has.
        others: places in modules with a way of their own to take a parameter, as recurrent ones have.
    """

    refs: list[ParamRef]
    dictionaries: list[dict[str, Any]]
    names: list[str]
    indices: list[int]
    others: list[tuple[ParamRef, int]]


class ModulePlaces:
    """Places in modules, and what they hold. They change together, four times in a step."""

    def __init__(self) -> None:
        self._places: list[tuple[ParamRef, int]] = []
        self._slots: _Slots | None = None
        self._shown: Sequence[nn.Parameter] | None = None

    def add(self, param_ref: ParamRef, index: int) -> None:
        """`param_ref` is a place of the parameter `index`, maybe known before."""
        self._slots = None  # its module may have another dictionary now
        if not any(param_ref is each for each, _ in self._places):
            self._places.append((param_ref, index))
            param_ref.keeps_place = True

    def remove(self, param_ref: ParamRef) -> None:
        """`param_ref` is a place of none of these parameters any more."""
        self._slots = None
        self._places = [each for each in self._places if each[0] is not param_ref]

    def show(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let modules hold these, unless they do: always the same list for the same purpose."""
        if parameters is self._shown:
            return
        self._shown = parameters
        slots = self._slots or self._found()
        held = list(map(parameters.__getitem__, slots.indices))
        for _ in map(dict.__setitem__, slots.dictionaries, slots.names, held):
            pass
        for _ in map(setattr, slots.refs, repeat("held"), held):
            pass
        for param_ref, index in slots.others:
            param_ref.hold(parameters[index])

    def displaced(self) -> set[int]:
        """Of which parameters modules hold something else than was shown last. Those that take parameters in a way of
        their own are left out."""
        slots, shown = self._slots, self._shown
        if slots is None or shown is None:
            return set()
        found = map(dict.get, slots.dictionaries, slots.names)
        others = map(is_not, found, map(shown.__getitem__, slots.indices))
        return set(compress(slots.indices, others))

    def _found(self) -> _Slots:
        slots = self._slots = _Slots([], [], [], [], [])
        for param_ref, index in self._places:
            module = param_ref.module_ref()
            if module is None or type(module).__setattr__ is not nn.Module.__setattr__:
                slots.others.append((param_ref, index))
                continue
            slots.refs.append(param_ref)
            slots.dictionaries.append(module._parameters)
            slots.names.append(param_ref.attribute)
            slots.indices.append(index)
        return slots
