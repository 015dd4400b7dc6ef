"""What a rank has of a model's parameters and buffers, by their names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..base.fqns import TRANSPARENT, clean, fqn
from ..flat.flat_param import FlatParamHandle
from ..layout.layout import ParamSpec, Span
from ..runtime.module_tree import units_in
from ..runtime.unit import Unit
from .owned_interval import OwnedInterval, RemoteElements


@dataclass(frozen=True, eq=False)
class NamedParam:
    """A parameter of a model, or a buffer that belongs to the model's state.

    What lies in a shard (`spec`, the spans, `local_view`, `interval`) can be asked of parameters in units.

    Attributes:
        name: its first clean name; `names`: all of them. [Note: clean names]
        unit: the unit that owns it; None outside of every unit (ignored, not wrapped, a buffer).
        kind, index: it is leaf number `index` of `unit.handles[kind]`; 0 without a unit.
        leaf: the user's parameter, which shows a shard of itself at rest if it is in a unit; or the buffer.
    """

    name: str
    names: tuple[str, ...]
    unit: Unit | None
    kind: int
    index: int
    leaf: torch.Tensor

    @property
    def handle(self) -> FlatParamHandle | None:
        """The handle that owns it; None outside of every unit."""
        return None if self.unit is None else self.unit.handles[self.kind]

    @property
    def _in_shard(self) -> FlatParamHandle:
        assert self.unit is not None
        return self.unit.handles[self.kind]

    @property
    def spec(self) -> ParamSpec:
        """The layout's entry, by the name in the model."""
        return replace(self._in_shard.layout.params[self.index], name=self.name)

    @property
    def span_in_shard(self) -> Span:
        """Where this rank's elements lie in the shard."""
        return self._in_shard.layout.span_in_shard(self.index, self._in_shard.rank)

    @property
    def span_in_param(self) -> Span:
        """Which elements this rank owns, in memory order."""
        return self._in_shard.layout.span_in_param(self.index, self._in_shard.rank)

    @property
    def has_elements(self) -> bool:
        """Whether this rank owns some, or nobody can because there are none."""
        return not self.span_in_shard.is_empty or self.spec.numel == 0

    def local_view(self, shard: torch.Tensor) -> torch.Tensor:
        """This rank's elements in what is laid out like the handle's shard, 1-D."""
        return shard[self.span_in_shard.slice]

    def interval(self, local: torch.Tensor) -> OwnedInterval:
        """`local`, one element for each that this rank owns, as a value that knows the other ranks."""
        unit, index, layout = self.unit, self.index, self._in_shard.layout
        assert unit is not None
        others = RemoteElements(
            unit.groups.shard.process_group,
            unit.groups.device,
            lambda: [layout.span_in_param(index, rank).numel for rank in range(layout.world)],
        )
        return OwnedInterval(
            local,
            self.spec,
            self.span_in_param,
            names_empty=self._in_shard.rank == 0,
            others=others if layout.world > 1 else None,
        )

    def in_place(self) -> torch.Tensor:
        """An interval over the memory of this rank's shard, or the whole tensor itself."""
        if self.unit is None:
            return self.leaf.detach()
        return self.interval(self.local_view(self._in_shard.shard.detach()))

    def saves(self, *, first: bool) -> bool:
        """Whether this rank saves it, of those that hold the same; `first`: whether this is the first of all ranks."""
        if self.unit is None:
            return first
        replicate = self.unit.groups.replicate
        return replicate is None or replicate.rank == 0


def named_state(module: nn.Module) -> list[NamedParam]:
    """Every parameter inside `module` once, units' own and others, in the order of its state dict. No communication."""
    units = units_in(module)
    places: dict[int, tuple[Unit | None, int, int]] = {
        id(leaf): (unit, kind, index)
        for unit in units
        for kind, handle in enumerate(unit.handles)
        for index, leaf in enumerate(handle.leaves)
    }
    held: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for unit in units:
        for param_ref in (*unit.param_refs, *unit.shared_refs):
            held.setdefault(id(param_ref.module), []).append((param_ref.attribute, param_ref.leaf))
    flat = {id(handle.flat_param) for unit in units for handle in unit.handles}
    names: dict[int, list[str]] = {}
    leaves: dict[int, nn.Parameter] = {}
    for path, inside in _modules(module, ""):
        own = dict(held.get(id(inside), ()))
        for attribute, parameter in inside._parameters.items():
            if parameter is not None and id(parameter) not in flat:
                own.setdefault(attribute, parameter)
        for attribute, leaf in own.items():
            leaves[id(leaf)] = leaf
            names.setdefault(id(leaf), []).append(f"{path}{attribute}")
    outside: tuple[Unit | None, int, int] = (None, 0, 0)
    return [NamedParam(found[0], tuple(found), *places.get(key, outside), leaves[key]) for key, found in names.items()]


def named_buffers(module: nn.Module) -> list[NamedParam]:
    """Every buffer of the state of `module` once, in the order of `module.modules()`. No communication."""
    names: dict[int, dict[str, None]] = {}
    held: dict[int, torch.Tensor] = {}
    for path, inside in module.named_modules(remove_duplicate=False):
        for name, buffer in inside._buffers.items():
            if buffer is not None and name not in inside._non_persistent_buffers_set:
                held[id(buffer)] = buffer
                names.setdefault(id(buffer), {})[clean(fqn(path, name))] = None
    return [NamedParam(next(iter(found)), tuple(found), None, 0, 0, held[key]) for key, found in names.items()]


def _modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """(clean path with a dot at its end, module) of all modules, several times if held several times, as state dicts
    walk."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, prefix if name in TRANSPARENT else f"{prefix}{name}.")
