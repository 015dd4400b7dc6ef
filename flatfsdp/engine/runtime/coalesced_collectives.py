"""Small units whose collectives are coalesced. [Note: coalescing]"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ..base.overrides import Override
from ..comm.tensor_groups import TensorGroup
from ..flat.flat_param import FlatParamHandle
from ..flat.reduction import Reduction, ReductionInput
from ..flat.sources import CoalescedSource, UnshardSource
from ..flat.views import SHOWS_NOTHING
from ..schedule.issue_order import coalesce
from .unit import Unit

REMEMBERED = 64  # cached sequences of units

_apart = Override(False)
# Inside, models are wrapped without coalescing: for tests of each unit's own collectives.
apart = functools.partial(_apart.being, True)


class Coalescer:
    """The groups of units of a model that share their collectives, and these collectives.

    Attributes:
        small: the bytes of units that can be in a group.
    """

    def __init__(self, *, most: int) -> None:
        """`most`: the maximum bytes of unsharded parameters in a group of units; 0 for no groups."""
        self._most = 0 if _apart.value else most
        self.small: dict[Unit, int] = {}
        self._groups: dict[tuple[str, tuple[Unit, ...]], tuple[tuple[Unit, ...], ...]] = {}  # a cache

    def measure(self, units: Iterable[Unit]) -> None:
        """Find the small units among `units`, without those with tied parameters, which are needed at other times, and
        with parameters on other meshes, which are sent over other axes."""
        alone = (unit for unit in units if not (unit.is_tied or unit.axes.elsewhere))
        sizes = {unit: sum(map(_unsharded_bytes, unit.handles)) for unit in alone}
        self.small.clear()  # in place: others have it
        self.small.update((unit, size) for unit, size in sizes.items() if 0 < size <= self._most)
        self.forget()

    def forget(self) -> None:
        """Clear the cache, after a change of options."""
        self._groups.clear()

    def gathers(self, sequence: Iterable[Unit]) -> Iterable[tuple[Unit, ...]]:
        """`sequence`, the order of gathers, cut into groups."""
        return self._cut("gathers", sequence, self._gather_of)

    def first_gather(self, unit: Unit, following: Iterable[Unit]) -> tuple[Unit, ...]:
        """`unit`, and the units `following` it that are gathered with it."""
        if unit not in self.small or not unit.is_sharded:
            return (unit,)

        def sharded() -> Iterator[Unit]:
            yield unit
            for each in following:
                if not each.is_sharded:
                    return
                yield each

        return next(coalesce(sharded(), self._gather_of, most=self._most))

    def reductions(self, sequence: Iterable[Unit]) -> Iterable[tuple[Unit, ...]]:
        """`sequence`, the order of reductions, cut into groups."""
        return self._cut("reductions", sequence, self._reduction_of)

    def _cut(
        self, what: str, sequence: Iterable[Unit], key: Callable[[Unit], tuple[int, object] | None]
    ) -> Iterable[tuple[Unit, ...]]:
        if not self.small:  # checked at every step, and few models have small units
            return [(unit,) for unit in sequence]
        units = tuple(sequence)
        groups = self._groups.get((what, units))
        if groups is None:
            if len(self._groups) == REMEMBERED:  # the order may be different at every step
                self._groups.clear()
            groups = self._groups[what, units] = tuple(coalesce(units, key, most=self._most))
        return groups

    def _gather_of(self, unit: Unit) -> tuple[int, object] | None:
        size = self.small.get(unit)
        alone = unit.groups.shard.size == 1 or unit.options.schedule.gathers_alone
        return None if size is None or alone else (size, id(unit.axes.own_transports.quantized))

    def _reduction_of(self, unit: Unit) -> tuple[int, object] | None:
        size, options = self.small.get(unit), unit.options
        hooked = options.all_reduce_hook is not None or options.comm_hook is not None
        if size is None or hooked:
            return None
        reducers = unit.resolved.reducers[unit.handles[0]]
        travels = unit.groups.shard.size > 1 or reducers[1] is not None
        return (size, (*map(id, reducers), unit.built.mixed_precision.reduce_error_feedback)) if travels else None

    # -- collectives -------------------------------------------------------------------------------------------------

    def launch_coalesced(self, units: Sequence[Unit], *, ahead: bool) -> Sequence[Unit]:
        """Issue the all-gathers of all sharded handles of a group of `units`; `ahead`: before their use. Returns the
        units that had any. Collective over the shard axis."""
        found: list[Unit] = []
        resources = units[0].resources
        stream = resources.streams.unshard
        alike: dict[tuple[torch.dtype, bool], list[tuple[FlatParamHandle, UnshardSource]]] = defaultdict(list)
        for unit in units:
            sharded = unit.prepare_unshard(ahead=ahead)
            for handle, source in sharded:
                alike[source.dtype, handle.precision.gather is None].append((handle, source))
            if sharded:
                unit.record_event("gather")
                found.append(unit)
        transports = units[0].axes.own_transports
        for (dtype, is_exact), gathered in alike.items():
            together = CoalescedSource(dtype)
            for handle, _ in gathered:
                handle.launch_unshard(together, stream)
            segments = TensorGroup.join([handle.unsharded.segments for handle, _ in gathered])
            pieces = TensorGroup.join([handle.at_rest.pieces for handle, _ in gathered])
            transport = transports.gather if is_exact else transports.quantized
            pending = transport.all_gather_coalesced(segments, pieces, stream)
            for handle, _ in gathered:
                handle.pending = pending
            if any(source.reads_host for _, source in gathered):
                resources.limiter.record_upload()
        return found

    def reduce(self, units: Sequence[Unit]) -> Sequence[Reduction]:
        """Issue the reductions of a group of `units`. Collective over the shard axis."""
        first, together = units[0], len(units) > 1
        streams, reducers = first.resources.streams, first.resolved.reducers
        by_dtype: dict[torch.dtype, list[ReductionInput]] = {}
        issued: list[Reduction] = []
        for unit in units:
            for part in _inputs_of(unit):
                if together:
                    by_dtype.setdefault(part.handle.precision.reduce, []).append(part)
                else:
                    issued.append(Reduction([part], *reducers[part.handle], streams.reduce, streams.replicate))
        for parts in by_dtype.values():
            both = reducers[first.handles[0]]
            issued.append(Reduction(parts, *both, streams.reduce, streams.replicate, coalesced=True))
        return issued


def _inputs_of(unit: Unit) -> list[ReductionInput]:
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
    unit.resources.events.append(("reduce", unit.place.name, unit.phase._value_))
    completes, hook = unit.resolved.completes, unit.options.all_reduce_hook
    made = []
    for grads in unit.grads:  # a comprehension is a call
        if grads.expected or grads.participates:
            made.append(grads.start_reduction(completes=grads.handle in completes, hook=hook))
    return made


def _unsharded_bytes(handle: FlatParamHandle) -> int:
    # In evaluation a unit may compute in the master dtype.
    itemsize = max(handle.precision.compute.itemsize, handle.precision.master.itemsize)
    return handle.layout.padded_numel * itemsize
