"""What quantized gradients have lost, as a part of a checkpoint. [Note: error feedback]

It is each rank's own, and lies in flat parameters, so it fits only ranks and wrapping as they were. The keys of its
tensors begin with a digest of these and the rank's number: whoever finds no such keys begins at zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..engine.agreement.once_per_job import warn_once_per_job
from ..engine.base.fqns import clean
from ..engine.comm.error_feedback import Residuals, residual_numels
from ..engine.runtime.rest import residuals_of
from ..engine.runtime.unit import Unit
from ..engine.state.optim.load_plan import TensorSpec
from .section import Section


class _Kind(NamedTuple):
    """One flat parameter: its key, its residuals, and of which dtype and how many these are, by axis."""

    key: str
    residuals: Residuals
    dtype: torch.dtype
    numels: Mapping[str, int]


class ResidualSection(Section):
    """The residuals of a model."""

    is_optional = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__("error_feedback", {})
        self._units = dict(_units(model))
        self._has_others = False

    def take(self, *, in_use: bool) -> None:
        # Otherwise the checkpoint decides which there are (`expect`).
        kinds = self._kinds() if in_use else ()
        self.state = {f"{kind.key}.{axis}": each.cpu() for kind in kinds for axis, each in kind.residuals.held.items()}

    def expect(self, there: Mapping[str, TensorSpec]) -> None:
        saved = {key.partition(".")[2] for key in there if key.startswith(f"{self.name}.")}
        mine = ((f"{kind.key}.{axis}", kind, numel) for kind in self._kinds() for axis, numel in kind.numels.items())
        self.state = {key: torch.empty(numel, dtype=kind.dtype) for key, kind, numel in mine if key in saved}
        self._has_others = bool(saved) and not self.state

    def load(self, read: Mapping[str, Any]) -> None:
        if self._has_others:
            warn_once_per_job(
                "the checkpoint has what quantized gradients had lost (reduce_error_feedback) on other ranks, or in "
                "units that were wrapped otherwise: what they lose begins at zero again"
            )
        for kind in self._kinds():
            own = {axis: self.state.get(f"{kind.key}.{axis}") for axis in kind.numels}
            kind.residuals.load({axis: each for axis, each in own.items() if each is not None})

    def _kinds(self) -> Iterator[_Kind]:
        facts = [(name, *_facts(unit)) for name, unit in self._units.items()]
        place = f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.{dist.get_rank()}"
        for name, unit in self._units.items():
            handles = [handle for handle in unit.handles if handle.precision.error_feedback]
            for number, (handle, residuals) in enumerate(zip(handles, residuals_of(unit), strict=True)):
                numels = residual_numels(handle.layout.shard_numel, unit.axes.of(handle))
                yield _Kind(f"{place}.{name or 'root'}.{number}", residuals, handle.precision.reduce, numels)


def _facts(unit: Unit) -> Iterator[object]:
    """What the residuals of `unit` fit."""
    for groups in unit.axes.all:
        for axis in (groups.shard, groups.replicate):
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
