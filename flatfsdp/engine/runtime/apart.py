"""Parameters that only some ranks of a model share, though they are no parts of wholes.

[Note: parameters apart] A unit, or some kinds of it, may be sharded over fewer ranks than others, and hold plain
tensors: experts that each rank has made itself. The ranks of each such mesh then have a parameter of their own under
the one name. These train as any do, and a norm has all of them. A checkpoint, which knows names alone, could hold one
only. Where a model has DTensors on a mesh beside its units' axes, plain tensors are taken for copies along that.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..comm.transport import Transport
from ..flat.flat_param import FlatParamHandle
from .unit import Unit


def apart(units: Sequence[Unit]) -> list[tuple[Unit, FlatParamHandle]]:
    """The handles in `units`, all of a model, whose parameters are such, each with its unit. No communication."""
    worlds = {groups.world for unit in units for groups in unit.axes.all}
    if len(worlds) < 2 or any(each.part is not None for unit in units for v in unit.views for each in v.extended):
        return []
    most = max(worlds)
    return [(unit, handle) for unit in units for handle in unit.handles if unit.axes.of(handle).world < most]


def axes_of_norms(units: Sequence[Unit], every: Sequence[Transport]) -> dict[FlatParamHandle, list[Transport]]:
    """For the handles that are `apart`, and without replicas, the axes over which norms of their gradients add up: some
    of `every` axis of the model, which reach all of its ranks. Precondition: the units are connected."""
    found: dict[FlatParamHandle, list[Transport]] = {}
    for unit, handle in apart(units):
        groups = unit.axes.of(handle)
        if groups.replicate is not None:
            continue
        own = set(groups.shard.ranks)
        wider = [axis for axis in every if own < {*axis.group.ranks}]
        taken = wider[:1] or [unit.axes.transports_of(handle).gather][: len(own) - 1]
        reached = {*own, *(rank for axis in taken for rank in axis.group.ranks)}
        for axis in every:
            if len(reached & {*axis.group.ranks}) == 1:
                taken.append(axis)
                reached |= {*axis.group.ranks}
        found[handle] = taken
    return found
