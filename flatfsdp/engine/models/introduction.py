"""The introduction of a model to the other ranks, once its units are named and connected: what they compare before the
first collective, as numbers and words instead of units."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields

from torch import Tensor

from ...api import MixedPrecision
from ...errors import logger
from ..agreement.agreement import agreement_of
from ..agreement.process_groups import extent_of, groups_in_words
from ..base.peers import Fact, UnitEntry
from ..flat.faces import fact_of
from ..planning.planned import PlannedLayout
from ..runtime.setup import Setup
from ..runtime.unit import Unit
from ..transforms.extensions import transformed_in
from .spread import axes_of, each_once, own_axes


def introduce(setup: Setup, *, training: bool) -> None:
    """Compare the units of `setup` with those of the other ranks; `training`: their initial values, too. Collective
    over all groups."""
    units, resources, agreement = setup.units, setup.resources, agreement_of(setup.agreement)
    agreement.connect(
        axes_of(units),
        unit_entries(units),
        names_in(units),
        gathers=each_once(each.gather for unit in units for each in unit.axes.transports.values()),
        sharded=any(unit.axes.is_spread for unit in units),
        comm_stats=resources.comm_stats,
        events=resources.events,
    )
    settings = setup.settings
    agreement.compare(
        functools.partial(
            describe, units, check_values=settings.check_values, join_units_below=settings.join_units_below
        ),
        setup.checksums if training else None,
    )
    for plan in {id(plan): plan for unit in units for plan in unit.axes.all if plan.replicate is not None}.values():
        logger.info("%s over %s: %s", plan.strategy.name, extent_of(plan), groups_in_words(plan))
    logger.debug("initialized %d units: %s", len(units), ", ".join([unit.label for unit in units]))


def describe(units: Sequence[Unit], *, check_values: str, join_units_below: int) -> list[Fact]:
    """All facts that must be equal on the ranks of a model, in a fixed order."""
    facts = [("construction", "succeeded", True), ("check_values", check_values, True)]
    facts.append(("join_units_below", str(join_units_below), True))
    settings = {name: value for axis in own_axes(units) for name, value in axis.settings.items()}
    return [*facts, *((name, value, True) for name, value in settings.items()), *facts_of(units)]


def facts_of(units: Sequence[Unit]) -> list[Fact]:
    """Those of units, which may be about to run for the first time."""
    facts: list[Fact] = []
    numbers = {unit: str(number) for number, unit in enumerate(units)}
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
                ", ".join(numbers[owning_unit] for owning_unit in unit.owning_units),
                False,
            ),
        ]
        for handle, views in zip(unit.handles, unit.views, strict=True):
            forms = {id(each.leaf): each.describe() for each in transformed_in(views)}
            over = (
                f", sharded over {extent_of(unit.axes.elsewhere[handle])} ranks"
                if handle in unit.axes.elsewhere
                else ""
            )
            layout = handle.layout
            grains = layout.grains if isinstance(layout, PlannedLayout) else (1,) * len(layout.params)
            for spec, leaf, grain in zip(layout.params, handle.leaves, grains, strict=True):
                dtype = str(handle.shard.dtype).removeprefix("torch.")
                grad = "requires_grad" if leaf.requires_grad else "no requires_grad"
                stride = "" if spec.stride is None or spec.part is not None else f" strides {spec.stride}"
                shape = f"{dtype} {spec.whole.shape}{stride}{forms.get(id(leaf), '')}, {grad}{over}"
                cut = "" if grain == 1 else f", cut at multiples of {grain:,} elements"
                facts.append((f"{subject}, parameter {spec.name}", f"{shape}{cut}", False))
            if isinstance(layout, PlannedLayout):
                facts.append((f"{subject}, places of its parameters", f"by a plan, {layout.digest()}", False))
    return facts


def _unlike_default(precision: MixedPrecision) -> str:
    plain = MixedPrecision()
    settings = [(field.name, getattr(precision, field.name)) for field in fields(precision)]
    return ", ".join(f"{name}={value}" for name, value in settings if value != getattr(plain, name)) or "none"


def _prefetch_of(unit: Unit) -> str:
    """The setting of a unit; whether it was named decides on early waits. [Note: in waits]"""
    return f"{unit.options.backward_prefetch}{'' if unit.options.names_prefetch else ' by default'}"


def unit_entries(units: Iterable[Unit]) -> list[UnitEntry]:
    """The labels of `units`, and the ranges of their parameters among those of the model."""
    return [
        UnitEntry(unit.label, range(unit.position.first_parameter, unit.position.first_parameter + _count(unit)))
        for unit in units
    ]


def _count(unit: Unit) -> int:
    return sum(len(handle.leaves) for handle in unit.handles)


def names_in(units: Iterable[Unit]) -> Callable[[], Iterable[str]]:
    """A function for the paths of the parameters of `units`, in order. It holds the units weakly."""
    alive = [weakref.ref(unit) for unit in units]

    def names() -> Iterable[str]:
        for ref in alive:
            if (unit := ref()) is not None:
                for handle in unit.handles:
                    yield from (unit.entries.fqn(spec.name) for spec in handle.layout.params)

    return names


def own_pieces(unit: Unit) -> dict[str, Tensor]:
    """This rank's piece of each parameter of which it has one, 1-D, by path inside the unit."""
    return {
        handle.layout.params[owned.index].name: handle.shard[owned.in_shard.slice]
        for handle in unit.handles
        if handle.has_memory
        for owned in handle.layout.owned(handle.rank)
    }
