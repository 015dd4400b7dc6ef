"""The facts of a model that ranks compare, as values for `agreement`: numbers, bits and words instead of units."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields

from torch import Tensor, nn

from ...api import MixedPrecision
from ..base import _torch
from ..base.peers import BackwardPlan, Fact, UnitEntry, bits_of
from ..comm.axes import extent_of
from ..comm.transport import Transport
from ..flat.faces import fact_of
from .unit import Unit

_requires_grad = operator.attrgetter("requires_grad")

Flags = tuple[tuple[bool, ...], ...]  # of the leaves of a unit, by handle


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


def describe(units: Sequence[Unit], *, check_values: str, join_units_below: int) -> list[Fact]:
    """All facts that must be equal on the ranks of a model, in a fixed order."""
    facts = [("construction", "succeeded", True), ("check_values", check_values, True)]
    facts.append(("join_units_below", str(join_units_below), True))
    settings = {name: value for axis in own_axes(units) for name, value in axis.settings.items()}
    facts += [(name, value, True) for name, value in settings.items()]
    places = {unit: str(place) for place, unit in enumerate(units)}
    for unit in units:
        subject, groups = f"unit {unit.label}", unit.groups
        argument, value = fact_of([handle.face for handle in unit.handles])
        facts += [
            (subject, f"of class {unit.entries.class_name}", False),
            (f"{subject}, sharding_strategy", groups.strategy.name, False),
            (f"{subject}, ranks", extent_of(groups), False),
            (f"{subject}, {argument}", value, False),
            (f"{subject}, layout", ", ".join(handle.options.layout for handle in unit.handles[:1]), False),
            (f"{subject}, mixed_precision", _unlike_default(unit.built.mixed_precision), False),
            (f"{subject}, backward_prefetch", _prefetch_of(unit), False),
            (f"{subject}, forward_prefetch", str(unit.options.forward_prefetch), False),
            (f"{subject}, schedule", "; ".join(unit.options.describe()) or "as built", False),
            (
                f"{subject}, tied to units in places",
                ", ".join(places[owning_unit] for owning_unit in unit.owning_units),
                False,
            ),
        ]
        for handle, views in zip(unit.handles, unit.views, strict=True):
            kinds = {id(each.leaf): each.describe() for each in views.extended}
            over = (
                f", sharded over {extent_of(unit.axes.elsewhere[handle])} ranks"
                if handle in unit.axes.elsewhere
                else ""
            )
            for spec, leaf in zip(handle.layout.params, handle.leaves, strict=True):
                dtype = str(handle.shard.dtype).removeprefix("torch.")
                grad = "requires_grad" if leaf.requires_grad else "no requires_grad"
                stride = "" if spec.stride is None or spec.part is not None else f" strides {spec.stride}"
                shape = f"{dtype} {spec.whole.shape}{stride}{kinds.get(id(leaf), '')}, {grad}{over}"
                facts.append((f"{subject}, parameter {spec.name}", shape, False))
    return facts


def _unlike_default(precision: MixedPrecision) -> str:
    plain = MixedPrecision()
    settings = [(field.name, getattr(precision, field.name)) for field in fields(precision)]
    return ", ".join(f"{name}={value}" for name, value in settings if value != getattr(plain, name)) or "none"


def unit_entries(units: Iterable[Unit]) -> list[UnitEntry]:
    """The labels of `units`, and the ranges of their parameters among those of the model."""
    return [
        UnitEntry(unit.label, range(unit.place.first_parameter, unit.place.first_parameter + _count(unit)))
        for unit in units
    ]


def own_pieces(unit: Unit) -> dict[str, Tensor]:
    """This rank's piece of each parameter of which it has one, 1-D, by path inside the unit."""
    return {
        handle.layout.params[owned.index].name: handle.shard[owned.in_shard.slice]
        for handle in unit.handles
        if handle.has_memory
        for owned in handle.layout.owned(handle.rank)
    }


# -- parameters --------------------------------------------------------------------------------------------------------


def steppable_of(unit: Unit) -> list[nn.Parameter]:
    """The parameters of `unit` that an optimizer sees."""
    return [parameter for handle in unit.handles for parameter in handle.face.holders]


def trained(unit: Unit) -> Flags:
    """By handle, which leaves of `unit` require a gradient."""
    flags: Flags = ()
    for handle in unit.handles:
        known = handle.face.flags
        flags += (tuple(map(_requires_grad, handle.leaves)) if known is None else known,)
    return flags


def trained_parameters(units: Iterable[Unit]) -> tuple[bool, ...]:
    """Which parameters of `units` require a gradient, by what users have set."""
    flags: list[bool] = []
    with _torch.as_plain_tensors():  # they may be hidden
        for unit in units:
            for handle in unit.handles:
                flags += map(_requires_grad, handle.face.flagged)
    return tuple(flags)


def names_of_leaves(units: Iterable[Unit]) -> dict[int, str]:
    """The path of every parameter of `units` in their model, by the ids of its leaf and its holder."""
    return {
        id(parameter): unit.entries.fqn(spec.name)
        for unit in units
        for handle in unit.handles
        for index, spec in enumerate(handle.layout.params)
        for parameter in handle.face.objects_of(index)
    }


def names_in(units: Iterable[Unit]) -> Callable[[], Iterable[str]]:
    """A function for the paths of the parameters of `units`, in order. It holds the units weakly."""
    alive = [weakref.ref(unit) for unit in units]

    def names() -> Iterable[str]:
        for ref in alive:
            if (unit := ref()) is not None:
                for handle in unit.handles:
                    yield from (unit.entries.fqn(spec.name) for spec in handle.layout.params)

    return names


# -- backwards ---------------------------------------------------------------------------------------------------------


def backward_plan(
    sync: bool,
    brings: bool,
    entered: Iterable[Unit],
    anchored: Iterable[Unit],
    trained: Mapping[Unit, Flags],
    retained: Sequence[int],
    schedule: str,
) -> BackwardPlan:
    """A backward of these units in numbers. `trained`: which of their parameters require a gradient."""
    return BackwardPlan(
        sync,
        brings,
        [unit.place.index for unit in entered],
        [unit.place.index for unit in anchored],
        [(unit.place.index, kind) for unit, flags in trained.items() for kind, each in enumerate(flags) if any(each)],
        sum(bits_of(itertools.chain(*flags)) << unit.place.first_parameter for unit, flags in trained.items()),
        [*retained],
        schedule,
    )


def _count(unit: Unit) -> int:
    return sum(len(handle.leaves) for handle in unit.handles)


def lacking_in(unit: Unit) -> int:
    """The parameters of `unit` of which this rank has no gradient in the reduction: one bit for each, as among those of
    the model. [Note: unused]"""
    bits, start = 0, unit.place.first_parameter
    for grads in unit.grads:
        for index in grads.missing_contributions():
            bits |= 1 << start + index
        start += len(grads.handle.leaves)
    return bits


def leave_out(unit: Unit, absent: int) -> None:
    """Record the parameters of `unit` in `absent`, of which no rank has a gradient: they get none."""
    start = unit.place.first_parameter
    for grads in unit.grads:
        grads.absent = frozenset(i for i in grads.missing_contributions() if absent >> start + i & 1)
        start += len(grads.handle.leaves)


def _prefetch_of(unit: Unit) -> str:
    """The setting of a unit; whether it was named decides on early waits. [Note: in waits]"""
    return f"{unit.options.backward_prefetch}{'' if unit.options.names_prefetch else ' by default'}"
