"""Leaves whose gradients are counted, of units that gather the next one half-way. [Note: half-way]"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .unit import Unit


class GradientCounter:
    """Told in a unit's place when a leaf's gradient is there: tells the unit, and then the running backward how much
    came. Other units pay nothing for it."""

    __slots__ = ("__weakref__", "_unit")

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def leaf_ready(self, kind: int, index: int) -> None:
        """Autograd accumulated the gradient of a leaf."""
        unit = self._unit()
        if unit is None:
            return
        unit.leaf_ready(kind, index)  # afterwards the gradient has been let go
        backward = unit.root.iteration.backward
        if backward is not None:
            backward.gradient_elements_arrived(unit, unit.handles[kind].layout.params[index].numel)
