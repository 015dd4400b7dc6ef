"""Which unit owns which parameter, and which models are alive: what must be known across models. Everything is held
weakly."""

from __future__ import annotations

import weakref

from torch import nn

from .root import Root
from .unit import Unit

# By identity of the parameter; entries die with their parameter or unit.
_owned: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[Unit]]] = {}

# Grows with every wrap: what was checked against the registry is checked again when it has.
generation = 0

roots: weakref.WeakSet[Root] = weakref.WeakSet()


def owners() -> dict[int, Unit]:
    """The owning unit of every managed parameter, by `id(parameter)`."""
    alive: dict[int, Unit] = {}
    for key, (leaf_ref, unit_ref) in list(_owned.items()):
        leaf, unit = leaf_ref(), unit_ref()
        if leaf is None or unit is None:
            del _owned[key]
        else:
            alive[key] = unit
    return alive


def own(unit: Unit) -> None:
    """`unit` owns its handles' leaves from now on."""
    global generation
    generation += 1
    for handle in unit.handles:
        for leaf in handle.leaves:
            _owned[id(leaf)] = (weakref.ref(leaf), weakref.ref(unit))


def disown(unit: Unit) -> None:
    """`unit` is being taken apart."""
    for handle in unit.handles:
        for leaf in handle.leaves:
            _owned.pop(id(leaf), None)
