"""What becomes of the reduced gradients of one backward.

[Note: finishers] A backward hands reduced gradients to its *finisher*, as it goes and when it ends. The one here makes
them `.grad`; a feature hands down another one at the point `finisher` of its observer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ..agreement.agreement import Agreement
from ..flat.deferred_grad import PendingGradients, can_defer
from ..flat.flat_param import FlatParamHandle
from .grad_accumulators import GradAccumulators
from .model_facts import steppable_of
from .unit import Unit

Finished = list[tuple[Unit, Sequence[FlatParamHandle]]]


class Finisher:
    """Makes reduced gradients `.grad` when the backward ends.

    Attributes:
        acts_early: whether it wants to know what is reduced while the backward goes on.
        ends_with_all: whether the backward ends with all of its reductions.
        pending: gradients that have yet to come when it has ended.
    """

    acts_early = False
    ends_with_all = True
    pending: PendingGradients | None = None

    def reduced(self, units: Iterable[Unit]) -> None:
        """The backward is through with `units`, whose gradients have been reduced and complete on this rank."""

    def backward_ended(self, units: Iterable[Unit], under_way: Sequence[Unit]) -> Finished:
        """`units` are at rest again; all that was issued has been reduced but what is `under_way`. Those units whose
        gradients are complete now, and the handles of which, whose hooks have yet to run."""
        return [(unit, complete) for unit in units if (complete := unit.finalize_grads())]

    def backward_failed(self, units: Sequence[Unit]) -> None:
        """The backward over `units` failed. Called during exception handling: must not block or communicate."""


class DeferLast(Finisher):
    """Lets what was issued last be reduced beside what the user does next: whoever reads it waits. [Note: deferred
    gradients]"""

    ends_with_all = False

    def __init__(self, agreement: Agreement, accumulators: GradAccumulators) -> None:
        self._agreement = agreement  # a model, in a circle with what awaits, would live until the collector comes
        self._accumulators = accumulators

    def backward_ended(self, units: Iterable[Unit], under_way: Sequence[Unit]) -> Finished:
        later = [unit for unit in under_way if self._can_wait(unit)]
        finished = super().backward_ended([unit for unit in units if unit not in later], ())
        if later:
            self._defer(later)
        return finished

    def _can_wait(self, unit: Unit) -> bool:
        """Whether nobody looks at gradients of `unit` but by reading `.grad`, which can be made to wait."""
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
    """`finalize_grads` of `unit` without waiting for what is being reduced; what waits for it, by handle."""
    for grads in unit.grads:
        if grads.reducing:
            yield grads.finalize_grads_later()
        else:
            grads.finalize_grads()
