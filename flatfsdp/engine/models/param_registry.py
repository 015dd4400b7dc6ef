"""The registry across models: the unit that owns each parameter, and the models that are alive. All references are
weak."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..flat.faces import Face, adoptions
from ..flat.param_refs import ParamRef
from ..flat.write_tracker import FlatParameter
from ..runtime.model import Model
from ..runtime.unit import Unit


class _Units:
    """Units by the identity of an object. An entry is removed with its object, and is None once its unit is deleted."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], weakref.ref[Unit]]] = {}

    def find(self, thing: object) -> Unit | None:
        """The unit of `thing`."""
        entry = self._entries.get(id(thing))
        return entry[1]() if entry is not None and entry[0]() is thing else None

    def add(self, thing: object, unit: Unit) -> None:
        """Set the unit of `thing`."""
        key, entries = id(thing), self._entries

        def forget(gone: weakref.ref[Any]) -> None:
            entry = entries.get(key)
            if entry is not None and entry[0] is gone:
                del entries[key]

        entries[key] = (weakref.ref(thing, forget), weakref.ref(unit))

    def discard(self, thing: object) -> None:
        """Remove the entry of `thing`."""
        self._entries.pop(id(thing), None)


_of_parameters = _Units()
_of_modules = _Units()

# Units with holders that users may swap, and units by the ids of these holders. A reference to one, even a weak one,
# would keep users from that; so a unit that is found here is searched for the holder.
_with_holders: weakref.WeakSet[Unit] = weakref.WeakSet()
_of_holders: dict[int, weakref.ref[Unit]] = {}
_of_holders_at = -1  # the number of replaced holders when this was built

# Incremented by every wrap: checks against the registry are repeated after it.
generation = 0

# In the order of their construction, which is the same on all ranks: what is done for several may be collective.
models: weakref.WeakKeyDictionary[Model, None] = weakref.WeakKeyDictionary()


# Units with transformed parameters.
extended: weakref.WeakSet[Unit] = weakref.WeakSet()


def owner_of(parameter: torch.Tensor) -> Unit | None:
    """The unit that manages `parameter`."""
    if (found := _of_parameters.find(parameter)) is not None or not _with_holders:
        return found
    if _of_holders_at != adoptions.count:
        _find_holders()
    unit = of_it() if (of_it := _of_holders.get(id(parameter))) is not None else None
    holders = [] if unit is None else [holder for handle in unit.handles for holder in _swapped_in(handle.face)]
    return unit if any(parameter is holder for holder in holders) else None


def is_orphan(parameter: torch.Tensor) -> bool:
    """Whether it is a flat parameter with which no model computes: a copy, or its model was deleted."""
    return isinstance(parameter, FlatParameter) and owner_of(parameter) is None


def _swapped_in(face: Face) -> Sequence[nn.Parameter]:
    """The holders that users may swap."""
    return face.holders if face.users_swap_holders else ()


def _find_holders() -> None:
    global _of_holders_at
    _of_holders.clear()
    for unit in _with_holders:
        for handle in unit.handles:
            _of_holders.update(dict.fromkeys(map(id, _swapped_in(handle.face)), weakref.ref(unit)))
    _of_holders_at = adoptions.count


def owners_of(shared_refs: Iterable[ParamRef]) -> list[Unit]:
    """The units that own the leaves of `shared_refs`, each once."""
    found = (owner_of(param_ref.leaf) for param_ref in shared_refs)
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def unit_around(module: nn.Module) -> Unit | None:
    """The unit with parameters whose own modules include `module`."""
    return _of_modules.find(module)


def own(unit: Unit) -> None:
    """Register `unit` as the owner of its handles' leaves and of their holders."""
    global generation, _of_holders_at
    generation += 1
    if any(handle.face.users_swap_holders for handle in unit.handles):
        _with_holders.add(unit)
        _of_holders_at = -1
    for handle in unit.handles:
        for parameter in {*handle.leaves, *handle.face.originals, handle.flat_param}:
            _of_parameters.add(parameter, unit)
    for module in unit.built.modules if unit.handles else ():
        if _of_modules.find(module) is None:  # a module that several share stays with the first
            _of_modules.add(module, unit)
    if any(views.extended for views in unit.views):
        extended.add(unit)


def own_besides(unit: Unit, parameters: Iterable[nn.Parameter]) -> None:
    """Register `unit` as the owner of `parameters` that it has replaced: modules outside with one are tied to it."""
    for parameter in parameters:
        _of_parameters.add(parameter, unit)


def disown(unit: Unit) -> None:
    """Remove `unit`, which is being taken apart."""
    _with_holders.discard(unit)
    for handle in unit.handles:
        for parameter in {*handle.leaves, *handle.face.originals, handle.flat_param}:
            _of_parameters.discard(parameter)
    for module in unit.built.modules:
        if _of_modules.find(module) is unit:
            _of_modules.discard(module)
    extended.discard(unit)
