"""Small units whose collectives are coalesced.

[Note: coalescing] A collective takes about the same time of the host for any size, so consecutive small units in the
agreed order are gathered, and reduced, as one. A number of bytes decides which units are small, and bounds the total
of a group: its staging buffer, and the memory that is allocated ahead of its use. Order and sizes are equal on all
ranks, and so are the groups.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from ..base.overrides import Override
from ..comm.tensor_groups import TensorGroup
from ..device.streams import DONE, PendingWork, Stream
from ..flat.flat_param import FlatParamHandle
from ..flat.reduction import Reduction, ReductionInput
from ..flat.sources import UnshardedParam, UnshardSource
from ..runtime.unit import Unit
from ..runtime.unit_collectives import UnitCollectives, inputs_of

U = TypeVar("U")

REMEMBERED = 64  # cached sequences of units

_uncoalesced = Override(False)
# Inside, models are wrapped without coalescing: for tests of each unit's own collectives.
uncoalesced = functools.partial(_uncoalesced.being, True)


class CoalescedSource(UnshardSource):
    """The shards of several handles, gathered by one collective over the shard axis. The caller issues it, and sets the
    pending work of the handles."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def fill(self, unsharded: UnshardedParam, stream: Stream) -> PendingWork:
        return DONE


class Coalescer(UnitCollectives):
    """The groups of units of a model that share their collectives, and these collectives."""

    def __init__(self, *, most: int) -> None:
        """`most`: the maximum bytes of unsharded parameters in a group of units."""
        self._most = most
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

    def reduce_coalesced(self, units: Sequence[Unit]) -> Sequence[Reduction]:
        """Issue the reductions of a group of several `units`. Collective over the shard axis."""
        first = units[0]
        streams, reducers = first.resources.streams, first.resolved.reducers[first.handles[0]]
        by_dtype: dict[torch.dtype, list[ReductionInput]] = {}
        for unit in units:
            for each in inputs_of(unit):
                by_dtype.setdefault(each.handle.precision.reduce, []).append(each)
        return [
            Reduction(inputs, *reducers, streams.reduce, streams.replicate, coalesced=True)
            for inputs in by_dtype.values()
        ]


def coalescer_for(*, most: int) -> UnitCollectives:
    """The groups of units of a new model; `most`: as for `Coalescer`, or 0 for units that are never in a group."""
    return Coalescer(most=most) if most and not _uncoalesced.value else UnitCollectives()


def _unsharded_bytes(handle: FlatParamHandle) -> int:
    # In evaluation a unit may compute in the master dtype.
    itemsize = max(handle.precision.compute.itemsize, handle.precision.master.itemsize)
    return handle.layout.padded_numel * itemsize


def coalesce(
    sequence: Iterable[U], key: Callable[[U], tuple[int, object] | None], *, most: int
) -> Iterator[tuple[U, ...]]:
    """Split `sequence` into groups of units that share their collectives; reads one unit beyond the end of a group.

    Args:
        sequence: units in the order of their collectives.
        key: (the bytes of a unit, a value that must be equal in its group); None for a unit that stays alone.
        most: the most bytes of a group.
    """
    group: list[U] = []
    common: object = None
    room = 0
    for unit in sequence:
        size, mine = key(unit) or (most, object())
        if group and (size > room or mine != common):
            yield tuple(group)
            group = []
        if not group:
            common, room = mine, most
        group.append(unit)
        room -= size
    if group:
        yield tuple(group)
