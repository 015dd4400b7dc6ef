"""Which unit owns which parameter, and which models are alive: what must be known across models. Everything is held
weakly."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..flat.faces import adoptions
from ..flat.flat_param import FlatParamHandle
from ..flat.param_refs import ParamRef
from .model import Model
from .unit import Unit


class _Units:
    """Units by the identity of an object. An entry dies with its object, and is none once the unit is gone."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], weakref.ref[Unit]]] = {}

    def find(self, thing: object) -> Unit | None:
        """The unit of `thing`."""
        entry = self._entries.get(id(thing))
        return entry[1]() if entry is not None and entry[0]() is thing else None

    def add(self, thing: object, unit: Unit) -> None:
        """`unit` is that of `thing` from now on."""
        key, entries = id(thing), self._entries

        def forget(gone: weakref.ref[Any]) -> None:
            entry = entries.get(key)
            if entry is not None and entry[0] is gone:
                del entries[key]

        entries[key] = (weakref.ref(thing, forget), weakref.ref(unit))

    def discard(self, thing: object) -> None:
        """`thing` has no unit any more."""
        self._entries.pop(id(thing), None)


_of_parameters = _Units()
_of_modules = _Units()

# Units whose holders are no leaves, and these by the ids of the holders. No reference to a holder, not even a weak one,
# or users could not swap it; so what is found is looked for in the unit.
_with_holders: weakref.WeakSet[Unit] = weakref.WeakSet()
_of_holders: dict[int, weakref.ref[Unit]] = {}
_of_holders_at = -1  # how many holders users had replaced when this was made

# Grows with every wrap: what was checked against the registry is checked again when it has.
generation = 0

models: weakref.WeakSet[Model] = weakref.WeakSet()


# Units that see some parameters transformed.
extended: weakref.WeakSet[Unit] = weakref.WeakSet()


def owner_of(parameter: torch.Tensor) -> Unit | None:
    """The unit that manages `parameter`."""
    if (found := _of_parameters.find(parameter)) is not None or not _with_holders:
        return found
    if _of_holders_at != adoptions.count:
        _find_holders()
    unit = of_it() if (of_it := _of_holders.get(id(parameter))) is not None else None
    return unit if unit is not None and handle_of_holder(unit, parameter) is not None else None


def handle_of_holder(unit: Unit, parameter: torch.Tensor) -> FlatParamHandle | None:
    """The handle of `unit` of which `parameter` is a holder that is no leaf. [Note: faces]"""
    apart = (handle for handle in unit.handles if not handle.face.holds_leaves)
    return next((handle for handle in apart if any(parameter is each for each in handle.face.holders)), None)


def _find_holders() -> None:
    global _of_holders_at
    _of_holders.clear()
    for unit in _with_holders:
        for handle in unit.handles:
            _of_holders.update(dict.fromkeys(map(id, handle.face.holders), weakref.ref(unit)))
    _of_holders_at = adoptions.count


def owners_of(shared_refs: Iterable[ParamRef]) -> list[Unit]:
    """The units that own what these refer to, each once."""
    found = (owner_of(param_ref.leaf) for param_ref in shared_refs)
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def unit_around(module: nn.Module) -> Unit | None:
    """The unit with parameters whose own modules include `module`."""
    return _of_modules.find(module)


def own(unit: Unit) -> None:
    """`unit` owns its handles' leaves from now on, and what stands for them."""
    global generation, _of_holders_at
    generation += 1
    if any(handle.face.is_distributed for handle in unit.handles):
        _with_holders.add(unit)
        _of_holders_at = -1
    for handle in unit.handles:
        for leaf in handle.leaves:
            _of_parameters.add(leaf, unit)
    for module in unit.built.modules if unit.handles else ():
        if _of_modules.find(module) is None:  # a module that several share stays with the first
            _of_modules.add(module, unit)
    if any(views.extended for views in unit.views):
        extended.add(unit)


def own_besides(unit: Unit, parameters: Iterable[nn.Parameter]) -> None:
    """`unit` owns these, too, in whose places it has others: a module outside of it that holds one is tied to it."""
    for parameter in parameters:
        _of_parameters.add(parameter, unit)


def disown(unit: Unit) -> None:
    """`unit` is being taken apart."""
    _with_holders.discard(unit)
    for handle in unit.handles:
        for leaf in handle.leaves:
            _of_parameters.discard(leaf)
    for module in unit.built.modules:
        if _of_modules.find(module) is unit:
            _of_modules.discard(module)
    extended.discard(unit)
