"""Placeholders in the modules of a unit, for as long as a state dict is made or loaded. [Note: placeholders]"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...flat.flat_param import FlatParamHandle
from ...flat.placeholder import Placeholder
from ...flat.views import ParamRef
from ...runtime.unit import Unit

# By the id of the leaf: modules of several units hold the same placeholder where they hold the same parameter.
_standing: weakref.WeakValueDictionary[int, Placeholder] = weakref.WeakValueDictionary()


class Placeholders:
    """Placeholders in all homes of one unit, those of parameters that it borrows included, or `within` one module.

    Attributes:
        unit: whose modules hold them.
    """

    def __init__(self, unit: Unit, *, receives: bool, within: nn.Module | None = None) -> None:
        self.unit = unit
        self._held: list[tuple[ParamRef, bool, Any]] = []  # what was there, and whether it was registered
        self._placeholders: dict[int, Placeholder] = {}
        places = _places((unit, *unit.owners))
        for home in (*unit.homes, *unit.aliases):
            if within is not None and home.module is not within:
                continue
            placeholder = _standing.get(id(home.leaf))
            if placeholder is None:
                placeholder = _made(home.leaf, places, receives=receives)
                _standing[id(home.leaf)] = self._placeholders[id(home.leaf)] = placeholder
            registered = home.attribute in home.module._parameters
            self._held.append((home, registered, home.held))
            home.module.__dict__.pop(home.attribute, None)
            home.module._parameters[home.attribute] = placeholder

    def remove(self) -> dict[int, torch.Tensor]:
        """Put back what was there; returns what parameters have received, or what was assigned in their place, by the
        id of the leaf."""
        received = {key: each.received for key, each in self._placeholders.items() if each.received is not None}
        for home, registered, held in reversed(self._held):
            now = home.module._parameters.get(home.attribute)
            if now is not None and type(now) is not Placeholder:
                received[id(home.leaf)] = now.detach()
            if registered:
                home.module._parameters[home.attribute] = held  # in its place among the others
            else:
                home.module._parameters.pop(home.attribute, None)
                home.module.__dict__[home.attribute] = held
        self._held.clear()
        for key in self._placeholders:
            _standing.pop(key, None)
        self._placeholders.clear()
        return received


def stand_in(leaf: nn.Parameter, owners: Iterable[Unit]) -> Placeholder:
    """A placeholder for `leaf`, which one of `owners` owns; it receives nothing."""
    return _made(leaf, _places(owners), receives=False)


def _places(units: Iterable[Unit]) -> dict[int, tuple[FlatParamHandle, int]]:
    """Where the units' leaves are, by their ids."""
    return {
        id(leaf): (handle, index)
        for unit in units
        for handle in unit.handles
        for index, leaf in enumerate(handle.leaves)
    }


def _made(leaf: nn.Parameter, places: dict[int, tuple[FlatParamHandle, int]], *, receives: bool) -> Placeholder:
    handle, index = places[id(leaf)]
    shape = handle.layout.params[index].shape
    return Placeholder.of(leaf, shape, handle.precision.master, handle.device, receives=receives)
