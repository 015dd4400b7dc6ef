"""Values of the first rank on every rank: its state dict, its buffers, a description of them.

[Note: from rank 0] Descriptions (keys, shapes, dtypes, non-tensor values) are broadcast at once. Tensors follow one by
one when they are copied to their destination: whole into a buffer (`broadcast_tensor`), into the shards of a unit all
together (`consolidate.scatter`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..agreement.object_collectives import firsts, is_first_of
from ..base.plain_data import decode, encode
from ..comm.transport import Transport
from ..models.spread import own_axes
from ..runtime.unit import Unit
from .model.distributed_values import LazyValue
from .named_param import named_buffers
from .owned_interval import OwnedInterval
from .parts import broadcast_tensor, every_axis


def broadcast_value(axes: Sequence[Transport], value: Any) -> Any:
    """The first rank's `value`; others' are ignored. It may contain user-defined objects. Collective over `axes`."""
    return decode(firsts(axes, encode(value, objects=True)), objects=True)


class FromRank0(LazyValue):
    """A value of the first rank's state dict.

    Attributes:
        value: the value there, None on other ranks.
        unit: the unit over whose axes, and those of parts, it is sent.
    """

    value: torch.Tensor | None
    unit: Unit
    why = "only rank 0 has"

    def fetch_into(self, target: torch.Tensor) -> None:
        device = self.unit.groups.device
        target.copy_(broadcast_tensor(every_axis([self.unit]), self.value, target.shape, target.dtype, device))


def spread(unit: Unit, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace the entries of `state_dict` below `prefix` by the first rank's. Collective over both axes of `unit`, and
    those of parts of parameters inside.

    Does nothing inside a wrapper whose entries were replaced already. Each rank keeps its own `OwnedInterval`s.

    Raises:
        UsageError: on every rank: a value cannot be sent.
    """
    found = ((key, value) for key, value in state_dict.items() if key.startswith(prefix))
    own = {key: value for key, value in found if not isinstance(value, OwnedInterval)}
    if any(isinstance(value, FromRank0) for value in own.values()):
        return
    axes = every_axis([unit])
    described = [
        (key, tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else (key, None, value)
        for key, value in (own if is_first_of(axes) else {}).items()
    ]
    known = broadcast_value(axes, _refusal(described, own) or described)
    if isinstance(known, str):
        raise UsageError(f"load_state_dict() from rank 0: {known}")
    for key in own:
        del state_dict[key]
    for key, shape, what in known:
        if shape is None:
            state_dict[key] = what
        else:
            state_dict[key] = FromRank0.of(own[key] if is_first_of(axes) else None, shape, what)
            state_dict[key].unit = unit


def _refusal(described: list[tuple[str, Any, Any]], own: dict[str, Any]) -> str | None:
    """The reason why the first rank's values cannot be sent; None if they can."""
    for key, shape, what in described:
        value = own[key]
        if shape is not None and (value.is_meta or value.layout != torch.strided):
            return f"{key!r} is a {value.layout} tensor on {value.device}, expected a dense one with values"
        if shape is None:
            try:
                encode(what, objects=True)
            except UsageError as error:
                return f"{key!r}: {error}"
    return None


def shares_buffers(units: Collection[Unit], module: nn.Module) -> bool:
    """Whether `take_buffers` communicates: any of `units` is sharded, or they have replicas, and buffers to take."""
    if any(each.axes.is_spread for each in units):
        return True
    return bool(own_axes(list(units))) and bool(named_buffers(module))


def take_buffers(unit: Unit, module: nn.Module, destination: Any, prefix: str) -> None:
    """Replace buffers of `module` in `destination` by those of the first rank. Collective over both axes of `unit`.
    Called if `shares_buffers`.

    [Note: buffers of ranks] Ranks keep buffers of their own (running statistics of the data that each has seen), so a
    state dict that is the same on all ranks must take one rank's. Full state dicts under any strategy, and files, hold
    the first rank's; those made without communication (sharded and local state dicts) hold each rank's own. So they do
    for buffers that the first rank does not have, or that are not dense tensors there. Without shards only this takes
    communication: a full state dict for rank 0 alone, or of a module without buffers, needs no other rank.
    """
    axes = own_axes([unit])
    keys = [prefix + name for each in named_buffers(module) for name in each.names]
    own = {key: destination[key] for key in keys if key in destination}
    described = [(key, each.shape, each.dtype) for key, each in own.items() if _can_travel(each)]
    for key, shape, dtype in broadcast_value(axes, described):
        value = broadcast_tensor(axes, own.get(key), shape, dtype, unit.groups.device)
        if key in own and not is_first_of(axes):
            destination[key] = value.to(own[key].device)


def _can_travel(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta
