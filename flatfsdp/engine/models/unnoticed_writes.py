"""Parameters that are unsharded between iterations, compared with their shards.

[Note: unnoticed writes] Original parameters and DTensors count no version for in-place writes to their `.data`, and
DTensors none for writes to a list of them (`torch._foreach_*`). So if such parameters are kept unsharded, they are
compared with the shard, value by value, before a computation uses them: this reads twice the shard, where a gather
would move all of the parameter. If they are still being gathered, the shard is compared with a copy. Values may change
on some ranks only, so ranks exchange a flag after comparisons, before any of them gathers: at the first gather of a
forward, for parameters that are kept by choice or stay on the device, and when a user requests such a unit. A
comparison waits for the device: on accelerators it is made only for parameters that the schedule keeps, for which ranks
exchange a flag in any case, and never for a unit that is `trusted`. Parameters that are quantized in gathers, or
transformed by hooks of their class, have other values than the shard: only their versions are compared.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..base.overrides import is_memoryless
from ..flat.flat_param import FlatParamHandle
from ..flat.layout_views import own_pieces_of
from ..flat.states import GATHERING, SHARDED
from ..runtime.unit import Unit


def is_compared(unit: Unit, handle: FlatParamHandle) -> bool:
    """Whether the values of kept parameters of `handle` are compared: the same on all ranks."""
    # without other counters, all writes change the shard's version
    if not handle.face.misses_data_writes or handle.precision.gather is not None or not handle.gathers_elements:
        return False
    if unit.kept.trusted or is_memoryless():
        return False
    keeps = unit.options.schedule.keeps_by_choice and handle.persistence is None
    return keeps or not unit.resources.device.has_streams


def copy_shards(unit: Unit) -> None:
    """A gather of `unit` is about to be requested: keep what it sends, if only a comparison shows later writes."""
    unit.kept.shards.clear()
    compares = unit.kept.by_choice and not (unit.resources.device.has_streams or is_memoryless())
    if compares and any([handle.face.misses_data_writes for handle in unit.handles]):
        shards = [(handle.shard.detach(), handle.has_memory) for handle in unit.handles]
        unit.kept.shards += [shard.clone() if has_memory else shard for shard, has_memory in shards]


def is_stale(unit: Unit, handle: FlatParamHandle) -> bool:
    """Whether the shard of `handle`, which is unsharded or being gathered, was written to since."""
    if handle.state is GATHERING:
        if handle.writes.was_written_since_gathered:
            return True
        kept = unit.kept.shards
        return bool(kept) and _differ([handle.shard], [kept[unit.handles.index(handle)]])
    return handle.writes.is_stale or differs(unit, handle)


def differs(unit: Unit, handle: FlatParamHandle) -> bool:
    """Whether parameters that are kept, unsharded or as a copy, have other values than the shard, if only a comparison
    shows it. [Note: unnoticed writes]"""
    if handle.state is SHARDED:
        flat = handle.kept_source.copy if handle.kept_source is not None else None
    else:
        flat = handle.unsharded.flat if handle.unsharded.buffer is not None else None
    if flat is None or not is_compared(unit, handle):
        return False
    if not _differ(handle.at_rest.pieces, own_pieces_of(flat, handle.layout, handle.rank)):
        return False
    unit.kept.maybe_stale = True  # other ranks may have found nothing
    return True


_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _differ(pieces: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Whether `pieces`, in the dtype and on the device of the `others`, have other values."""
    for piece, other in zip(pieces, others, strict=True):
        if not torch.equal(_bits(piece.detach().to(other.device, other.dtype)), _bits(other.detach())):
            return True
    return False


def _bits(values: torch.Tensor) -> torch.Tensor:
    """`values` as integers, all of which, unlike NaN, are equal to themselves."""
    return values.view(_WHOLE_NUMBERS[values.itemsize]) if values.itemsize in _WHOLE_NUMBERS else values
