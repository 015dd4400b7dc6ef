"""A model's parameters and buffers by their names, and the elements of them that a rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from ...errors import UsageError
from ..base.fqns import clean, fqn
from ..comm.axes import ProcessGroups
from ..flat.flat_param import FlatParamHandle
from ..layout.layout import ParamSpec, Span
from ..models.walks import units_in
from ..runtime.unit import Unit
from .owned_interval import OwnedInterval, RemoteElements
from .parts import transformed_of


@dataclass(frozen=True, eq=False)
class NamedParam:
    """A parameter of a model, or a buffer that belongs to the model's state.

    Only parameters in units have members that refer to a shard (`handle`, `spec`, the spans, `local_view`, `interval`).

    Attributes:
        name: its first clean name; `names`: all of them. [Note: clean names]
        leaf: the parameter with which modules compute; or the buffer.
        unit: the unit that owns it; None outside of every unit (ignored, not wrapped, a buffer).
        kind, index: it is leaf number `index` of `unit.handles[kind]`; 0 without a unit.
    """

    name: str
    names: tuple[str, ...]
    leaf: torch.Tensor
    unit: Unit | None = None
    kind: int = 0
    index: int = 0

    @property
    def handle(self) -> FlatParamHandle:
        """The handle that owns it."""
        assert self.unit is not None
        return self.unit.handles[self.kind]

    @property
    def original(self) -> torch.Tensor:
        """The user's parameter itself: it shows a shard at rest, and the whole inside `summon_full_params()`."""
        return self.leaf if self.unit is None else self.handle.face.originals[self.index]

    @property
    def spec(self) -> ParamSpec:
        """The layout's entry, with the name in the model."""
        return replace(self.handle.layout.params[self.index], name=self.name)

    @property
    def span_in_shard(self) -> Span:
        """The span of this rank's elements in the shard."""
        return self.handle.layout.span_in_shard(self.index, self.handle.rank)

    @property
    def span_in_param(self) -> Span:
        """The span of elements that this rank owns, in memory order."""
        return self.handle.layout.span_in_param(self.index, self.handle.rank)

    @property
    def has_elements(self) -> bool:
        """Whether this rank owns elements, or no rank can because the parameter has none."""
        return not self.span_in_shard.is_empty or self.spec.whole.numel == 0

    def local_view(self, shard: torch.Tensor) -> torch.Tensor:
        """This rank's elements, 1-D, of a tensor that is laid out like the handle's shard."""
        return shard[self.span_in_shard.slice]

    def interval(self, local: torch.Tensor) -> OwnedInterval:
        """`local`, one element for each that this rank owns, as a value that can reach the other ranks."""
        assert self.unit is not None
        index, layout = self.index, self.handle.layout
        groups = self.unit.axes.of(self.handle)
        made = interval_of(groups, local, self.spec, lambda rank: layout.span_in_param(index, rank))
        if (found := transformed_of(self.unit, self.kind, index)) is not None:
            made.assemble = partial(found.transform.assemble, state=found.state)
        return made

    def in_place(self) -> torch.Tensor:
        """An interval over the memory of this rank's shard, or the whole tensor itself."""
        if self.unit is None:
            return self.leaf.detach()
        return self.interval(self.local_view(self.handle.shard.detach()))

    def saves(self, *, first: bool) -> bool:
        """Whether this rank saves it, of those with equal values; `first`: whether this is the first of all ranks."""
        if self.unit is None:
            return first
        replicate, part = self.unit.axes.of(self.handle).replicate, self.spec.part
        return (replicate is None or replicate.rank == 0) and (part is None or part.copy == 0)


def interval_of(
    groups: ProcessGroups, local: torch.Tensor, spec: ParamSpec, span: Callable[[int], Span]
) -> OwnedInterval:
    """`local` as an interval of `spec`, of which each rank of the shard axis of `groups` has its `span`."""
    axis = groups.shard
    ranks = range(axis.size)
    others = RemoteElements(axis.process_group, groups.device, lambda: [span(rank).numel for rank in ranks])
    own = span(axis.rank)
    return OwnedInterval(local, spec, own, names_empty=axis.rank == 0, others=others if axis.size > 1 else None)


def params_of(units: Iterable[Unit]) -> Iterator[NamedParam]:
    """Every parameter that `units` own, by its path in its unit."""
    for unit in units:
        for kind, handle in enumerate(unit.handles):
            for index, (spec, leaf) in enumerate(zip(handle.layout.params, handle.leaves, strict=True)):
                yield NamedParam(spec.name, (spec.name,), leaf, unit, kind, index)


def by_handle(params: Iterable[NamedParam]) -> list[tuple[Unit, int, list[NamedParam]]]:
    """Those of `params` that are in units: (unit, number of the handle, those that lie in it), in their order."""
    found: dict[tuple[int, int], tuple[Unit, int, list[NamedParam]]] = {}
    for each in params:
        if each.unit is not None:
            found.setdefault((id(each.unit), each.kind), (each.unit, each.kind, []))[2].append(each)
    return list(found.values())


def refuse_rows_of_their_class(units: Iterable[Unit], what: str) -> None:
    """Refuse parameters of `units` whose shards have no values ([Note: rows of their class]).

    Raises:
        UsageError: `what`, a function or its subject, handles the elements of such a parameter.
    """
    for unit in units:
        for handle in [handle for handle in unit.handles if not handle.has_memory]:
            name, kept = handle.layout.params[0].name, handle.face.local_of(handle.face.holders[0])
            raise UsageError(
                f"{what}: parameter {unit.entries.fqn(name)!r} is a {type(kept).__name__}, whose class keeps its rows; "
                "expected plain elements. Save and load the state dicts of torch.distributed.checkpoint.state_dict, or "
                "`model.state_dict()`, with torch.distributed.checkpoint; `full_tensor()` of the parameter has the "
                "whole"
            )


def named_state(module: nn.Module) -> list[NamedParam]:
    """Every parameter inside `module` once, units' own and others, in the order of its state dict. No communication."""
    units = units_in(module)
    known = {id(each.leaf): each for each in params_of(units)}
    referred: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for unit in units:
        for param_ref in (*unit.param_refs, *unit.shared_refs):
            referred.setdefault(id(param_ref.module), []).append((param_ref.attribute, param_ref.leaf))
    flat = {id(handle.flat_param) for unit in units for handle in unit.handles}
    names: dict[int, list[str]] = {}
    for path, inside in module.named_modules(remove_duplicate=False):  # once for each place that holds it
        own = dict(referred.get(id(inside), ()))
        for attribute, parameter in inside._parameters.items():
            if parameter is not None and id(parameter) not in flat:
                own.setdefault(attribute, parameter)
        for attribute, leaf in own.items():
            known.setdefault(id(leaf), NamedParam("", (), leaf))
            names.setdefault(id(leaf), []).append(fqn(clean(path), attribute))
    return [replace(known[key], name=found[0], names=tuple(found)) for key, found in names.items()]


def named_buffers(module: nn.Module) -> list[NamedParam]:
    """Every buffer of the state of `module` once, in the order of `module.modules()`. No communication."""
    names: dict[int, dict[str, None]] = {}
    buffers: dict[int, torch.Tensor] = {}
    for path, inside in module.named_modules(remove_duplicate=False):
        for name, buffer in inside._buffers.items():
            if buffer is not None and name not in inside._non_persistent_buffers_set:
                buffers[id(buffer)] = buffer
                names.setdefault(id(buffer), {})[clean(fqn(path, name))] = None
    return [NamedParam(next(iter(found)), tuple(found), buffers[key]) for key, found in names.items()]
