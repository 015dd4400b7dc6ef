"""The collectives of units, each unit's alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ..flat.reduction import Reduction, ReductionInput
from ..flat.views import SHOWS_NOTHING
from .unit import Unit


class UnitCollectives:
    """How units share their collectives: not at all. A model may be given groups of small units instead. [Note:
    coalescing]

    Attributes:
        small: the bytes of units that can be in a group.
    """

    small: Mapping[Unit, int] = MappingProxyType({})

    def measure(self, units: Iterable[Unit]) -> None:
        """Find the small units among `units`, which are those of the model."""

    def forget(self) -> None:
        """Options have changed."""

    def gathers(self, sequence: Iterable[Unit]) -> Iterable[tuple[Unit, ...]]:
        """`sequence`, the order of gathers, cut into groups."""
        return [(unit,) for unit in sequence]

    def first_gather(self, unit: Unit, following: Iterable[Unit]) -> tuple[Unit, ...]:
        """`unit`, and the units `following` it that are gathered with it."""
        return (unit,)

    def reductions(self, sequence: Iterable[Unit]) -> Iterable[tuple[Unit, ...]]:
        """`sequence`, the order of reductions, cut into groups."""
        return [(unit,) for unit in sequence]

    def launch_coalesced(self, units: Sequence[Unit], *, ahead: bool) -> Sequence[Unit]:
        """Issue the all-gathers of all sharded handles of a group of `units`; `ahead`: before their use. Returns the
        units that had any. Collective over the shard axis."""
        return [unit for unit in units if unit.launch_unshard(ahead=ahead)]

    def reduce(self, units: Sequence[Unit]) -> Sequence[Reduction]:
        """Issue the reductions of a group of `units`. Collective over the shard axis."""
        if len(units) > 1:
            return self.reduce_coalesced(units)
        (unit,), issued = units, []
        streams, reducers = unit.resources.streams, unit.resolved.reducers
        for each in inputs_of(unit):
            issued.append(Reduction([each], *reducers[each.handle], streams.reduce, streams.replicate))
        return issued

    def reduce_coalesced(self, units: Sequence[Unit]) -> Sequence[Reduction]:
        """`reduce` of several units."""
        return [reduction for unit in units for reduction in self.reduce((unit,))]


def inputs_of(unit: Unit) -> list[ReductionInput]:
    """The inputs of a reduction of `unit`: the gradients of all kinds that take part."""
    for grads in unit.grads:
        slots = grads.slots
        # Gradients lie in the parameters' memory, or need memory that is free once the parameters are gone.
        if (slots.shares and grads.occupies_params) or (slots.late and grads.outlive_params):
            were_late = slots.late
            unit.reshard(SHOWS_NOTHING, unreached=True)
            if were_late and unit.options.backward_prefetch is not None:
                # Memory is free once the device has passed this unit: before the next gather, unless that is not ahead.
                unit.resources.limiter.make_room(None, ahead=True)
            break
    unit.resources.events.append(("reduce", unit.position.name, unit.phase._value_))
    completes, hook = unit.resolved.completes, unit.options.all_reduce_hook
    made = []
    for grads in unit.grads:  # a comprehension is a call
        if grads.expected or grads.participates:
            made.append(grads.start_reduction(completes=grads.handle in completes, hook=hook))
    return made
