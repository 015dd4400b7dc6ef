"""Parameters that only some ranks of a model share, and that are no parts of wholes.

[Note: parameters apart] A unit, or some of its kinds, may be sharded over fewer ranks than others, and hold plain
tensors, for example experts that each rank has constructed itself. The ranks of each such mesh then have different
parameters under one name. All of them are trained, and included in norms. A checkpoint, with one entry per name, could
hold only one. With DTensors on a mesh in addition to units' axes, plain tensors are assumed to be copies along it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..comm.transport import Transport
from ..flat.flat_param import FlatParamHandle
from .unit import Unit


def apart(units: Sequence[Unit]) -> list[tuple[Unit, FlatParamHandle]]:
    """The handles in `units`, all of a model, with such parameters, each with its unit. No communication."""
    worlds = {groups.world for unit in units for groups in unit.axes.all}
    if len(worlds) < 2 or any(each.part is not None for unit in units for v in unit.views for each in v.extended):
        return []
    most = max(worlds)
    return [(unit, handle) for unit in units for handle in unit.handles if unit.axes.of(handle).world < most]


def axes_of_norms(units: Sequence[Unit], every: Sequence[Transport]) -> dict[FlatParamHandle, list[Transport]]:
    """For the handles that are `apart`, and without replicas, the axes over which norms of their gradients are summed:
    a subset of `every` axis of the model that reaches all of its ranks. Precondition: the units are connected."""
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
