"""The ranks over which the parameters of a model are spread: those of its units' axes, those that store other parts of
the same wholes ([Note: parts of wholes]), and those that have other parameters altogether.

[Note: parameters apart] A unit, or some of its kinds, may be sharded over fewer ranks than others, and hold plain
tensors, for example experts that each rank has constructed itself. The ranks of each such mesh then have different
parameters under one name. All of them are trained, and included in norms. A checkpoint, with one entry per name, could
hold only one. With DTensors on a mesh in addition to units' axes, plain tensors are assumed to be copies along it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..comm.axes import ProcessGroups
from ..comm.transport import Transport
from ..flat.flat_param import FlatParamHandle
from ..runtime.unit import Unit
from ..transforms.extensions import transformed_in


class PartAxis(NamedTuple):
    """One axis of ranks that store parts of the same whole.

    Attributes:
        transport: over the axis.
        splits: whether they store different parts; otherwise copies of one.
    """

    transport: Transport
    splits: bool


PartAxes = tuple[PartAxis, ...]


def part_axes(unit: Unit, kind: int) -> list[PartAxes]:
    """For each leaf of the handle the axes of its parts, in the order of its mesh; none for a leaf that is no part."""
    axes: dict[int, PartAxes] = {}
    for each in transformed_in(unit.views[kind]):
        found = each.transform.axes(each.state, unit.groups.device)
        axes[id(each.leaf)] = tuple(PartAxis(unit.resources.transport(axis, "parts"), splits) for axis, splits in found)
    return [axes.get(id(leaf), ()) for leaf in unit.handles[kind].leaves]


def beside(groups: ProcessGroups, axes: Iterable[Transport]) -> list[Transport]:
    """Those of `axes` that contain no other rank of the axes of `groups`."""
    own = {*groups.shard.ranks, *(groups.replicate.ranks if groups.replicate is not None else ())}
    return [axis for axis in axes if len(own & {*axis.group.ranks}) == 1]


def all_part_axes(units: Sequence[Unit]) -> list[Transport]:
    """Every axis of parts of parameters in `units`, each once."""
    extended = ((unit, kind) for unit in units for kind, views in enumerate(unit.views) if views.extended)
    return each_once(axis.transport for where in extended for axes in part_axes(*where) for axis in axes)


def each_once(axes: Iterable[Transport]) -> list[Transport]:
    """The first of `axes` over each process group."""
    found: dict[int, Transport] = {}
    for axis in axes:
        found.setdefault(id(axis.group.process_group), axis)
    return list(found.values())


def own_axes(units: Sequence[Unit]) -> list[Transport]:
    """The axes over which `units` are gathered and reduced, each once."""
    found = [transports for unit in reversed(units) for transports in unit.axes.transports.values()]
    axes = [each for transports in found for each in (transports.scatter, transports.replicate)]
    return each_once(axis for axis in axes if axis is not None and axis.group.size > 1)


def axes_of(units: Sequence[Unit]) -> list[Transport]:
    """The axes over which the model of `units` is spread, those of parts of parameters included, each once."""
    return [*own_axes(units), *all_part_axes(units)]


def apart(units: Sequence[Unit]) -> list[tuple[Unit, FlatParamHandle]]:
    """The handles in `units`, all of a model, with such parameters, each with its unit. No communication."""
    worlds = {groups.world for unit in units for groups in unit.axes.all}
    if len(worlds) < 2:
        return []
    if any(each.part is not None for unit in units for views in unit.views for each in transformed_in(views)):
        return []
    most = max(worlds)
    return [(unit, handle) for unit in units for handle in unit.handles if unit.axes.of(handle).world < most]


def norm_axes(units: Sequence[Unit]) -> dict[FlatParamHandle, list[Transport]]:
    """For the handles that are `apart`, and without replicas, the axes over which norms of their gradients are summed:
    some of the model's that reach all of its ranks. Precondition: the units are connected."""
    found: dict[FlatParamHandle, list[Transport]] = {}
    handles = apart(units)
    every = axes_of(units) if handles else []
    for unit, handle in handles:
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
