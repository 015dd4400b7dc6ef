"""The ranks that store other parts of a unit's parameters, in addition to its own axes. [Note: parts of wholes]"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..comm.axes import ProcessGroups
from ..comm.transport import Transport
from .unit import Unit


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
    for each in unit.views[kind].extended:
        found = each.axes(unit.groups.device)
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
