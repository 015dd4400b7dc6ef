"""What quantized gradients have lost, as a part of a checkpoint. [Note: error feedback]

It is each rank's own, and lies in flat parameters, so it fits only ranks and wrapping as they were. The keys of its
tensors begin with a digest of these and the rank's number: whoever finds no such keys begins at zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine.agreement.once_per_job import warn_once_per_job
from ..engine.base.fqns import clean
from ..engine.comm.error_feedback import Residuals
from ..engine.runtime.rest import residuals_of
from ..engine.runtime.unit import Unit
from ..engine.state.optim.load_plan import TensorSpec
from .section import Section


class ResidualSection(Section):
    """The residuals of a model."""

    is_optional = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__("error_feedback", {})
        self._units = dict(_units(model))
        self._has_others = False

    def take(self, *, in_use: bool) -> None:
        # Otherwise the checkpoint decides which there are (`expect`).
        own = self._own() if in_use else ()
        self.state = {f"{key}.{axis}": held.cpu() for key, each in own for axis, held in each.held.items()}

    def expect(self, there: Mapping[str, TensorSpec]) -> None:
        prefix, mine = f"{self.name}.", {key for key, _ in self._own()}
        saved = {key.removeprefix(prefix): each for key, each in there.items() if key.startswith(prefix)}
        fitting = {key: each for key, each in saved.items() if key.rpartition(".")[0] in mine}
        self.state = {key: torch.empty(each.shape, dtype=each.dtype) for key, each in fitting.items()}
        self._has_others = bool(saved) and not fitting

    def load(self, read: Mapping[str, Any]) -> None:
        if self._has_others:
            warn_once_per_job(
                "the checkpoint has what quantized gradients had lost (reduce_error_feedback) on other ranks, or in "
                "units that were wrapped otherwise: what they lose begins at zero again"
            )
        found: dict[str, dict[str, torch.Tensor]] = {}
        for key, held in self.state.items():
            place, _, axis = key.rpartition(".")
            found.setdefault(place, {})[axis] = held
        for key, own in self._own():
            own.load(found.get(key, {}))

    def _own(self) -> Iterator[tuple[str, Residuals]]:
        """Those of each flat parameter, with its key."""
        facts = [(name, *_facts(unit)) for name, unit in self._units.items()]
        place = f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.{dist.get_rank()}"
        for name, unit in self._units.items():
            for kind, own in enumerate(residuals_of(unit)):
                yield f"{place}.{name or 'root'}.{kind}", own


def _facts(unit: Unit) -> Iterator[object]:
    """What the residuals of `unit` fit."""
    for axis in (unit.groups.shard, unit.groups.replicate):
        yield axis and axis.ranks
    for handle in unit.handles:
        yield handle.layout.digest(), handle.precision.reduce


def _units(model: nn.Module) -> Iterator[tuple[str, Unit]]:
    for name, module in model.named_modules():
        if isinstance(unit := module.__dict__.get("_unit"), Unit):
            yield clean(name), unit


def has_residuals(model: nn.Module) -> bool:
    """Whether gradients of `model` travel with error feedback."""
    return any(grads.residuals is not None for _, unit in _units(model) for grads in unit.grads)
