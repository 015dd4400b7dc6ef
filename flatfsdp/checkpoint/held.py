"""What a rank holds of a model, in place: the very memory of shards, buffers, and parameters outside of every unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..engine.layout.layout import ParamSpec
from ..engine.runtime.module_tree import units_in
from ..engine.runtime.rest import check_idle, quiesce
from ..engine.runtime.unit import Unit
from ..engine.state.model.fqns import clean, named_state
from ..engine.state.owned_interval import OwnedInterval

__all__ = ["LocalTensor", "buffers_of", "held_in_place", "note_writes", "settle"]


@dataclass(frozen=True)
class LocalTensor:
    """A parameter, or a buffer that belongs to the state.

    Attributes:
        names: all clean names ([Note: clean names]) of it, the first one first.
        value: an interval over this rank's shard itself, or the whole tensor itself.
        unit: the unit that owns it, if one does.
    """

    names: tuple[str, ...]
    value: torch.Tensor
    unit: Unit | None

    def saves(self, *, first: bool) -> bool:
        """Whether this rank saves it, of those that hold the same; `first`: whether this is the first of all ranks."""
        if self.unit is None:
            return first
        replicate = self.unit.groups.replicate
        return replicate is None or replicate.rank == 0


def settle(model: nn.Module, what: str) -> None:
    """Let shards hold what parameters are. No communication.

    Raises:
        UsageError: `what` (a function, for the message) was called while a unit computes.
    """
    units = units_in(model)
    quiesce(units, collective=False, check=lambda unit: check_idle(unit, what))


def held_in_place(model: nn.Module) -> list[LocalTensor]:
    """Parameters, then buffers, in the order of `model.modules()`. No communication.

    Precondition: `settle`.
    """
    found = []
    for named in named_state(model):
        value: torch.Tensor = named.leaf.detach()
        if named.unit is not None:
            handle = named.unit.handles[named.kind]
            spec = handle.layout.params[named.index]
            value = OwnedInterval(
                handle.shard.detach()[handle.layout.span_in_shard(named.index, handle.rank).slice],
                ParamSpec(named.name, spec.shape, spec.stride),
                handle.layout.span_in_param(named.index, handle.rank),
            )
        found.append(LocalTensor(named.names, value, named.unit))
    return [*found, *buffers_of(model)]


def buffers_of(model: nn.Module) -> Iterator[LocalTensor]:
    """Those of the state, in the order of `model.modules()`. No communication."""
    names: dict[int, list[str]] = {}
    held: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                held[id(buffer)] = buffer
                names.setdefault(id(buffer), []).append(clean(f"{path}.{name}" if path else name))
    for key, found in names.items():
        yield LocalTensor(tuple(dict.fromkeys(found)), held[key], None)


def note_writes(model: nn.Module) -> None:
    """Shards have been written to behind autograd's back: what was made of them is out of date."""
    shards = [handle.shard for unit in units_in(model) for handle in unit.handles]
    torch.autograd.graph.increment_version(shards)
