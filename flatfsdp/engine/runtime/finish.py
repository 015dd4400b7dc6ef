"""Finishers of backwards, which publish the reduced gradients.

[Note: finishers] A backward passes reduced gradients to its *finisher*, while it runs and when it ends. The one here
makes them `.grad`; a feature provides another one at the point `finisher` of its observer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..device.streams import Work
from ..flat.flat_param import FlatParamHandle
from .unit import Unit

Finished = list[tuple[Unit, Sequence[FlatParamHandle]]]


class Finisher:
    """Makes reduced gradients `.grad` when the backward ends.

    Attributes:
        acts_early: whether `reduced` is called while the backward runs.
        ends_with_all: whether all reductions have finished when the backward ends; else it may be asked to leave some.
        pending: gradients whose reductions have not finished when the backward ends.
    """

    acts_early = False
    ends_with_all = True
    pending: Work | None = None

    def reduced(self, units: Iterable[Unit]) -> None:
        """The backward has finished `units`, whose gradients are reduced, and complete on this rank."""

    def leaves(self, units: Sequence[Unit]) -> bool:
        """Whether the last reductions, those of `units`, may finish after the backward: then nobody else waits for
        them."""
        return False

    def backward_ended(self, units: Iterable[Unit]) -> Finished:
        """`units` are at rest again, and all reductions have finished except those that this finisher `leaves`. Returns
        the units with complete gradients, and their handles with complete gradients, whose hooks have not run yet."""
        return [(unit, complete) for unit in units if (complete := unit.finalize_grads())]

    def backward_failed(self, units: Sequence[Unit]) -> None:
        """The backward over `units` failed. Called during exception handling: must not block or communicate."""
