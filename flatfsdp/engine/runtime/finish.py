"""Finishers of backwards, which publish the reduced gradients.

[Note: finishers] A backward passes reduced gradients to its *finisher*, while it runs and when it ends. The one here
makes them `.grad`; a feature provides another one at the point `finisher` of its observer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ..base.peers import Peers
from ..flat.deferred_grad import PendingGradients, can_defer
from ..flat.flat_param import FlatParamHandle
from .grad_accumulators import GradAccumulators
from .model_facts import steppable_of
from .unit import Unit

Finished = list[tuple[Unit, Sequence[FlatParamHandle]]]


class Finisher:
    """Makes reduced gradients `.grad` when the backward ends.

    Attributes:
        acts_early: whether `reduced` is called while the backward runs.
        ends_with_all: whether all reductions have finished when the backward ends.
        pending: gradients whose reductions have not finished when the backward ends.
    """

    acts_early = False
    ends_with_all = True
    pending: PendingGradients | None = None

    def reduced(self, units: Iterable[Unit]) -> None:
        """The backward has finished `units`, whose gradients are reduced, and complete on this rank."""

    def backward_ended(self, units: Iterable[Unit], under_way: Sequence[Unit]) -> Finished:
        """`units` are at rest again, and all reductions have finished except those `under_way`. Returns the units with
        complete gradients, and their handles with complete gradients, whose hooks have not run yet."""
        return [(unit, complete) for unit in units if (complete := unit.finalize_grads())]

    def backward_failed(self, units: Sequence[Unit]) -> None:
        """The backward over `units` failed. Called during exception handling: must not block or communicate."""


class DeferLast(Finisher):
    """Overlaps the last reductions with the code after the backward; a read of `.grad` waits. [Note: deferred
    gradients]"""

    ends_with_all = False

    def __init__(self, agreement: Peers, accumulators: GradAccumulators) -> None:
        self._agreement = agreement  # not the model: pending gradients would form a reference cycle with it
        self._accumulators = accumulators

    def backward_ended(self, units: Iterable[Unit], under_way: Sequence[Unit]) -> Finished:
        later = [unit for unit in under_way if self._can_wait(unit)]
        finished = super().backward_ended([unit for unit in units if unit not in later], ())
        if later:
            self._defer(later)
        return finished

    def _can_wait(self, unit: Unit) -> bool:
        """Whether gradients of `unit` are only read through `.grad`, which can be made to wait."""
        nobody_else = self._accumulators.expects_gradients.isdisjoint(unit.handles)
        return nobody_else and all(map(can_defer, steppable_of(unit)))

    def _defer(self, units: Sequence[Unit]) -> None:
        finishes = [finish for unit in units for finish in _finalize_later(unit)]
        agreement = self._agreement

        def finish() -> None:
            with agreement.waiting("the reductions of a backward that was not the last"):
                for each in finishes:
                    each()

        self.pending = PendingGradients([parameter for unit in units for parameter in steppable_of(unit)], finish)


def _finalize_later(unit: Unit) -> Iterator[Callable[[], None]]:
    """`finalize_grads` of `unit` without waiting for running reductions; the functions that do wait, by handle."""
    for grads in unit.grads:
        if grads.reducing:
            yield grads.finalize_grads_later()
        else:
            grads.finalize_grads()
