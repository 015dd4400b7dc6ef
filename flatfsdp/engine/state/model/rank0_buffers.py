"""Buffers of gathered state dicts: the first rank's.

[Note: buffers of ranks] Ranks keep buffers of their own (running statistics, of the data that each has seen), so a
state dict that is the same on all ranks must take one rank's. What is gathered, or written, holds the first one's;
what a rank has without communication (sharded and local state dicts, NO_SHARD) holds its own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...agreement.object_collectives import firsts
from ...runtime.unit import Unit
from .fqns import clean
from .from_rank0 import axes_of


def names_of_buffers(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """The names in state dicts of all buffers of `module` that belong to its state."""
    for path, inside in module.named_modules(remove_duplicate=False):
        for name, buffer in inside._buffers.items():
            if buffer is not None and name not in inside._non_persistent_buffers_set:
                yield prefix + clean(f"{path}.{name}" if path else name)


def take_firsts(unit: Unit, units: Collection[Unit], module: nn.Module, destination: Any, prefix: str) -> None:
    """Replace buffers of `module` in `destination` by those of the first rank. Collective over both axes of `unit`
    where any of `units` is sharded; elsewhere ranks need not call together.

    Buffers that the first rank does not have, or that are no dense tensors there, stay this rank's own.
    """
    if all(each.groups.shard.size == 1 for each in units):
        return
    axes = [*axes_of(unit)]
    mine = {key: destination[key] for key in names_of_buffers(module, prefix) if key in destination}
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
