"""The layer between a wrapper and its unit: the model that it keeps alive, calls that only the outermost wrapper
accepts, and `.to()` and similar methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..base.fqns import WRAPPED
from ..flat.flat_param import FlatParamHandle
from ..flat.param_refs import enlist, unlist
from ..models.rest import check_outermost, free_unit, quiesce
from ..runtime.model import Model, model_of
from ..runtime.module_tree import faced_refs
from ..runtime.unit import Unit


def keep_model(wrapper: nn.Module, model: Model) -> None:
    """Let `wrapper` have the outermost unit of `model`, and keep the model alive with all its units."""
    wrapper.__dict__["_unit"], wrapper.__dict__["_kept_root"] = model.outermost, model


def owner_of(wrapper: nn.Module, name: str, value: object) -> nn.Module | None:
    """The inner module on which an attribute of `wrapper` must be set: if the value is a module or a parameter, or
    replaces one of them or a buffer. The wrapper lists the inner module's, and its forward uses nothing else."""
    inside: nn.Module | None = wrapper.__dict__.get("_modules", {}).get(WRAPPED)
    if inside is None or name in wrapper._modules or hasattr(type(wrapper), name):
        return None
    replaced = any(name in registered for registered in (inside._parameters, inside._buffers, inside._modules))
    return inside if replaced or isinstance(value, nn.Module | nn.Parameter) else None


@contextmanager
def no_sync(unit: Unit) -> Iterator[None]:
    """Accumulate without communication; only on the root."""
    model = check_outermost(unit, "no_sync()")
    quiesce([unit], shards=False)
    before, model.backwards.sync = model.backwards.sync, False
    try:
        yield
    finally:
        model.backwards.sync = before


def apply_to_tensors(
    wrapper: nn.Module,
    change: Callable[[torch.Tensor], torch.Tensor],
    change_others: Callable[[], Any],
    *,
    shards: bool = True,
) -> None:
    """`change` (cast or move) the `shards` of `wrapper`'s own unit; `change_others()` changes all else in the wrapper.

    Raises:
        UsageError: while a forward awaits its backward, unless nothing changes, and for a move to the meta device.
    """
    unit: Unit = wrapper.__dict__["_unit"]
    between = unit.shows_shard
    if not between and shards and _changes(unit, change):
        raise UsageError(
            f"unit {unit.label}: .to(), .half() and similar methods can be called only between iterations, but a "
            "forward here is still waiting for its backward. Run the backward first; if there will be none, run a "
            "forward of the model under torch.no_grad() to end the wait"
        )
    if any(change(handle.shard.new_empty(0)).is_meta and not handle.shard.is_meta for handle in unit.handles):
        raise UsageError(
            f"unit {unit.label}: moving it to the meta device would discard its values; use "
            "model.to_empty(device=...) for uninitialized memory, or wrap a module that is on the meta device"
        )
    for handle in unit.handles:
        if handle.options.packed and (dtype := change(handle.shard.new_empty(0)).dtype) != handle.shard.dtype:
            raise UsageError(
                f"unit {unit.label}: parameter {handle.layout.params[0].name!r} is a quantized weight, whose bytes "
                f"are stored as {handle.shard.dtype}: a conversion to {dtype} would change them. Convert individual "
                "modules before wrapping, or compute in another dtype with mixed_precision="
            )
    for handle in unit.handles:
        _check_cast(handle, change(handle.shard.new_empty(0)).dtype)
    if between:
        free_unit(unit)
    flat = unlist(unit.flat_refs)
    param_refs = faced_refs(unit)
    for param_ref, _ in param_refs:
        param_ref.unregister()
    try:
        change_others()
    finally:
        for param_ref, face in param_refs:
            face.put(param_ref)
        enlist(flat)
    if not (between and shards):
        return
    with torch.inference_mode(False), torch.no_grad():
        for handle, views in zip(unit.handles, unit.views, strict=True):
            if (changed := handle.changed_by(change)) is not None:
                views.replace_shard(changed)
    model_of(unit).setup.placed = False


def _check_cast(handle: FlatParamHandle, dtype: torch.dtype) -> None:
    """Refuse a shard of `dtype` where parameters are their own leaves, and the unit would compute with copies."""
    compute = handle.options.precision(dtype).compute
    if compute != dtype != handle.shard.dtype:
        handle.face.check_copied(
            f"unit {handle.label}: a conversion of its parameters to {dtype} after wrapping, while it computes in "
            f"{compute}"
        )


def _changes(unit: Unit, change: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether `change` gives the unit's shards or buffers another dtype or device."""
    held = [handle.shard for handle in unit.handles]
    held += [buffer for module in unit.built.modules for buffer in module._buffers.values() if buffer is not None]
    probed = [(tensor, change(tensor.new_empty(0))) for tensor in held]
    return any((made.dtype, made.device) != (tensor.dtype, tensor.device) for tensor, made in probed)
