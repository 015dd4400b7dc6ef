"""The elements of a model and its optimizer that one rank has, by names and intervals, in place. No communication.

[Note: holdings] A *holding* has for each parameter, like a checkpoint, the interval of its elements that a rank has, in
the parameter's memory order, and the same for each state of the parameter's shape; nothing in it depends on flat
parameters. So any layout over any ranks can be filled from any holdings that together have all elements. Its *facts*
are plain data; its tensors share memory with the model and the optimizer. The bytes of these, one after the other, are
the *block* of a rank: a copy of it, or a part of one, is a holding, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from ..engine.base.fqns import clean, fqn
from ..engine.base.plain_data import decode
from ..engine.flat.layout_views import dense, stored_in_order
from ..engine.guards.optimizer_hooks import wholes_of
from ..engine.models.walks import units_in
from ..engine.state.named_param import NamedParam, named_state, refuse_rows_of_their_class
from ..engine.state.optim.descriptions import KeptWhole, value_of
from ..engine.state.optim.param_map import OptimizedParam, ParamMap, groups_of
from ..errors import UsageError

ALIGNMENT = 64  # bytes: of each tensor in a block
SHARDED, OWN, KEPT = "sharded", "own", "kept"


class Entry(NamedTuple):
    """The elements that a rank has of one tensor.

    Attributes:
        name: of the parameter or buffer; state: of which state of the optimizer they are, "" for the parameter itself.
        shape, stride: of the whole tensor; None for row-major.
        start, numel: the elements, in memory order.
        kind: SHARDED; OWN, a tensor that is not sharded, of which each rank has its own; or KEPT, a state of another
            shape than its parameter's, of which each rank needs all.
    """

    name: str
    state: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    start: int
    numel: int
    kind: str = SHARDED

    @property
    def stop(self) -> int:
        """The end of the elements."""
        return self.start + self.numel

    @property
    def nbytes(self) -> int:
        """Their size."""
        return self.numel * self.dtype.itemsize


class Value(NamedTuple):
    """A state of an optimizer that has not the shape of its parameter; `on_device`: it is a tensor where that is."""

    value: Any
    on_device: bool


class Facts(NamedTuple):
    """A holding without its tensors: plain data.

    Attributes:
        entries: in the order of the block.
        values: by the name of the parameter, its other states.
        groups: the settings of the optimizer's param groups.
    """

    entries: tuple[Entry, ...]
    values: dict[str, dict[str, Value]]
    groups: tuple[dict[str, Any], ...]

    @classmethod
    def decoded(cls, data: bytes) -> Facts:
        """Those that were encoded: the entries by themselves, since they stay the same from step to step."""
        entries, values, groups = decode(data)
        return cls(decode(entries), values, groups)

    @property
    def offsets(self) -> list[int]:
        """For each entry its first byte in the block; and the size of that."""
        return [0, *accumulate(-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in self.entries)]

    def part(self, start: int, stop: int, data: torch.Tensor) -> Holding:
        """The bytes `[start, stop)` of the block with these facts, which are in `data`, as a holding. Both are
        multiples of `ALIGNMENT`, or the end."""
        entries, tensors = [], []
        for entry, offset in zip(self.entries, self.offsets, strict=False):
            first, last = max(start, offset), min(stop, offset + entry.nbytes)
            if first < last:
                begin, size = (first - offset) // entry.dtype.itemsize, (last - first) // entry.dtype.itemsize
                entries.append(entry._replace(start=entry.start + begin, numel=size))
                tensors.append(data[first - start : last - start].view(entry.dtype))
        return Holding(Facts(tuple(entries), self.values, self.groups), tensors)


@dataclass
class Holding:
    """The elements that a rank has, or had. [Note: holdings]

    Attributes:
        facts: what it is.
        tensors: for each of the entries its elements: 1-D.
    """

    facts: Facts
    tensors: Sequence[torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Holding:
        """The elements of this rank now, in place; the model is at rest.

        Raises:
            UsageError: a state of the optimizer that cannot be cut.
        """
        refuse_rows_of_their_class(units_in(model), "regroup()")
        found = [*_of_model(model)]
        values: dict[str, dict[str, Value]] = {}
        groups: tuple[dict[str, Any], ...] = ()
        if optimizer is not None:
            found += _of_optimizer(model, optimizer, values)
            groups = tuple(settings_of(group) for group in optimizer.param_groups)
        entries, tensors = [entry for entry, _ in found], [tensor for _, tensor in found]
        return cls(Facts(tuple(entries), values, groups), tensors)


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a param group."""
    return {key: value_of(value) for key, value in group.items() if key not in ("params", "param_names")}


def _of_model(model: nn.Module) -> Iterator[tuple[Entry, torch.Tensor]]:
    for named in named_state(model):
        if named.unit is None:
            yield _whole(named.name, "", named.leaf)
        elif not (span := named.span_in_param).is_empty:
            yield interval(named, "", span.start, named.local_view(named.handle.shard.detach()))
    for name, _, _, buffer in buffers_of(model):
        yield _whole(name, "", buffer)


def buffers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Every buffer once, also those that are not in state dicts: its name, its module, its name there."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield fqn(clean(path), name), module, name, buffer


def _of_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, dict[str, Value]]
) -> Iterator[tuple[Entry, torch.Tensor]]:
    """The states of the parameters' shapes; the others are added to `values`."""
    wholes = wholes_of(optimizer)
    for param in ParamMap(model, groups_of(model, optimizer)):
        if not (state := optimizer.state.get(param.parameter)):
            continue
        others: dict[str, Value] = {}
        held = wholes.held(param.parameter) if wholes is not None else None
        if held is not None:
            spec = param.params[0].spec
            for each in held[0]:
                shape, start, numel = each.spec.shape, each.span.start, each.span.numel
                stride, kind = (spec.stride, SHARDED) if shape == spec.shape else (None, KEPT)
                yield Entry(param.name, each.spec.name, each.dtype, shape, stride, start, numel, kind), each.local
            state = held[1]
        for name, value in param.pieces_of(state).items():
            if isinstance(value, KeptWhole):
                flat = value.as_subclass(torch.Tensor).detach().contiguous().view(-1)
                yield Entry(param.name, name, value.dtype, tuple(value.shape), None, 0, flat.numel(), KEPT), flat
                continue
            if is_shaped(param, name, value):
                yield from _cut(param, name, value.detach())
                continue
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.dim() and not param.keeps_any_shape:
                raise UsageError(
                    f"regroup(): optimizer state {name!r} of {param.name!r} is a tensor of shape {tuple(value.shape)}, "
                    f"where the stepped tensor here has {param.shape}: only states of the parameter's shape can be cut "
                    "for other ranks"
                )
            others[name] = value_in(value)
        values[param.name] = others


def value_in(state: Any) -> Value:
    """A copy of a state that has not the shape of its parameter."""
    return Value(value_of(state), isinstance(state, torch.Tensor) and state.device.type != "cpu")


def is_shaped(param: OptimizedParam, name: str, value: object) -> bool:
    """Whether a state has an element for each of the parameter's."""
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != param.shape:
        return False
    return bool(value.dim()) or (param.handle is not None and name != "step")


def _cut(param: OptimizedParam, state: str, value: torch.Tensor) -> Iterator[tuple[Entry, torch.Tensor]]:
    handle = param.handle
    if handle is None:
        yield _whole(param.name, state, value)
        return
    for named in param.params:
        span = named.span_in_param
        if span.is_empty:
            continue
        local = handle.face.elements_in(named.index, value)
        if local.dim() != 1:  # the rank has all of it
            stride = named.spec.stride
            local = dense(local.contiguous() if stride is None else stored_in_order(local, stride))
        yield interval(named, state, span.start, local)


def interval(named: NamedParam, state: str, start: int, local: torch.Tensor) -> tuple[Entry, torch.Tensor]:
    """An entry with its elements."""
    spec = named.spec
    return Entry(named.name, state, local.dtype, spec.shape, spec.stride, start, local.numel()), local


def whole(name: str, value: torch.Tensor, state: str = "") -> Entry:
    """All elements of a tensor that is not sharded."""
    return Entry(name, state, value.dtype, tuple(value.shape), None, 0, value.numel(), OWN)


def _whole(name: str, state: str, value: torch.Tensor) -> tuple[Entry, torch.Tensor]:
    return whole(name, value, state), value.detach().contiguous().view(-1)
