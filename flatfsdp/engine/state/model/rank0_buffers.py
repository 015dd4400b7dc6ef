"""Buffers of gathered state dicts: the first rank's.

[Note: buffers of ranks] Ranks keep buffers of their own (running statistics, of the data that each has seen), so a
state dict that is the same on all ranks must take one rank's. What is gathered, or written, holds the first one's;
what a rank has without communication (sharded and local state dicts, NO_SHARD) holds its own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from ...agreement.object_collectives import firsts
from ...runtime.unit import Unit
from ..named_param import named_buffers
from .from_rank0 import axes_of


def take_firsts(unit: Unit, units: Collection[Unit], module: nn.Module, destination: Any, prefix: str) -> None:
    """Replace buffers of `module` in `destination` by those of the first rank. Collective over both axes of `unit`
    where any of `units` is sharded; elsewhere ranks need not call together.

    Buffers that the first rank does not have, or that are no dense tensors there, stay this rank's own.
    """
    if all(each.groups.shard.size == 1 for each in units):
        return
    axes = [*axes_of(unit)]
    keys = [prefix + name for each in named_buffers(module) for name in each.names]
    mine = {key: destination[key] for key in keys if key in destination}
    described = [(key, [*each.shape], str(each.dtype)) for key, each in mine.items() if _can_travel(each)]
    for key, shape, dtype in json.loads(firsts(axes, json.dumps(described).encode())):
        own = mine.get(key)
        value = _received(own, shape, getattr(torch, dtype.removeprefix("torch.")), unit)
        for axis in axes:
            axis.broadcast(value)
        if own is not None and not all(axis.group.rank == 0 for axis in axes):
            destination[key] = value.to(own.device)


def _can_travel(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta


def _received(own: Any, shape: Sequence[int], dtype: torch.dtype, unit: Unit) -> torch.Tensor:
    """Memory on the compute device to send from, or to receive into; with `own`, if that is of this shape."""
    if _can_travel(own) and [*own.shape] == shape and own.dtype == dtype:
        found: torch.Tensor = own.detach().to(unit.groups.device, copy=True).contiguous()
        return found
    return torch.empty(shape, dtype=dtype, device=unit.groups.device)
