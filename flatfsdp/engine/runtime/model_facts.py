"""The facts of a model that ranks compare, as values for `agreement`: numbers, bits and words instead of units."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from ..base import _torch
from ..base.peers import BackwardPlan, bits_of
from .unit import Unit

_requires_grad = operator.attrgetter("requires_grad")

Flags = tuple[tuple[bool, ...], ...]  # of the leaves of a unit, by handle


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
                flagged, leaves = handle.face.flagged, handle.leaves
                found = map(_requires_grad, flagged)
                flags += found if len(flagged) == len(leaves) else [*found] * len(leaves)
    return tuple(flags)


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
        [unit.position.index for unit in entered],
        [unit.position.index for unit in anchored],
        [(unit.position.index, kind) for unit, flags in trained.items() for kind, one in enumerate(flags) if any(one)],
        sum(bits_of(itertools.chain(*flags)) << unit.position.first_parameter for unit, flags in trained.items()),
        [*retained],
        schedule,
    )


def lacking_in(unit: Unit) -> int:
    """The parameters of `unit` of which this rank has no gradient in the reduction: one bit for each, as among those of
    the model. [Note: unused]"""
    bits, start = 0, unit.position.first_parameter
    for grads in unit.grads:
        for index in grads.missing_contributions():
            bits |= 1 << start + index
        start += len(grads.handle.leaves)
    return bits


def leave_out(unit: Unit, absent: int) -> None:
    """Record the parameters of `unit` in `absent`, of which no rank has a gradient: they get none."""
    start = unit.position.first_parameter
    for grads in unit.grads:
        grads.absent = frozenset(i for i in grads.missing_contributions() if absent >> start + i & 1)
        start += len(grads.handle.leaves)
