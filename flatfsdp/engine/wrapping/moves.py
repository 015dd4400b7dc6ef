"""`.to()`, `.half()` and their like on a wrapper: its shards are cast or moved, between iterations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..runtime.rest import free_unit
from ..runtime.unit import Unit


def apply_to_tensors(
    wrapper: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], rest: Callable[[], Any]
) -> None:
    """`change` (cast or move) the shards of `wrapper`'s own unit; `rest()` changes everything else in the wrapper.

    Raises:
        UsageError: while a forward awaits its backward, unless nothing changes, and for a move to the meta device.
    """
    unit: Unit = wrapper.__dict__["_unit"]
    between = unit.is_between_iterations()
    if not between and _changes(unit, change):
        raise UsageError(
            f"unit {unit.label}: .to(), .half() and their like change parameters between iterations only; a forward "
            "here still awaits its backward"
        )
    if any(change(handle.shard.new_empty(0)).is_meta for handle in unit.handles):
        raise UsageError(
            f"unit {unit.label}: moving it to the meta device would throw away its values; use "
            "model.to_empty(device=...) for memory without values, or wrap a module that is on the meta device"
        )
    for handle in unit.handles:
        if handle.options.packed and (dtype := change(handle.shard.new_empty(0)).dtype) != handle.shard.dtype:
            raise UsageError(
                f"unit {unit.label}: parameter {handle.layout.params[0].name!r} is a quantised weight, whose bytes are "
                f"stored as {handle.shard.dtype}: as {dtype} they would be others. Change the dtype of single modules "
                "before wrapping, or compute in another one with mixed_precision="
            )
    if between:
        free_unit(unit)
    flat = {name: wrapper._parameters.pop(name) for name in list(wrapper._parameters) if name.startswith("_flat_param")}
    param_refs, hidden = (*unit.param_refs, *unit.shared_refs), unit.unregistered_refs
    for param_ref in param_refs:
        param_ref.unregister()
    try:
        rest()
    finally:
        for param_ref in param_refs:
            if not any(param_ref is other for other in hidden):
                param_ref.register()
        wrapper._parameters.update(flat)
    if not between:
        return
    with torch.no_grad():
        for handle, views in zip(unit.handles, unit.views, strict=True):
            changed = change(handle.shard)
            if changed is not handle.shard:
                views.replace_shard(changed.detach())
    unit.root.placed = False


def _changes(unit: Unit, change: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether `change` gives the unit's shards or buffers another dtype or device."""
    held = [handle.shard for handle in unit.handles]
    held += [buffer for module in unit.modules for buffer in module._buffers.values() if buffer is not None]
    probed = [(tensor, change(tensor.new_empty(0))) for tensor in held]
    return any((made.dtype, made.device) != (tensor.dtype, tensor.device) for tensor, made in probed)
