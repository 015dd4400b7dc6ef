"""Where parameters and buffers are: the device of a unit, `.to()` and its like on a wrapper, and the checks before a
forward that everything is in a unit, and on the device where it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ...api import Config
from ...errors import ConfigValueError, UsageError
from ..comm.process_groups import serves
from ..device.fake_tensors import is_memoryless
from ..device.streams import accelerator, concrete
from .module_tree import unmanaged_parameters
from .unit import Unit


def compute_device(module: nn.Module, config: Config) -> torch.device:
    """Where the unit computes: `device_id`; else where parameters on an accelerator are; else what the group serves.

    In a rehearsal it is always the CPU, which every machine has.
    """
    if is_memoryless():
        return torch.device("cpu")
    if isinstance(config.device_id, torch.device):
        named, here = concrete(config.device_id), accelerator()
        if named.type != "cpu" and (here is None or named.type != here.type):
            found = f"the accelerator here is {here}" if here is not None else "this machine has no accelerator"
            raise ConfigValueError(
                f"device_id: got {str(named)!r}, but {found}, or this build of torch cannot use it; leave it out to "
                f"train on {here.type if here is not None else 'CPU'}"
            )
        return named
    if isinstance(config.device_id, int):
        chosen = accelerator(config.device_id)
        if chosen is None:
            raise ConfigValueError(
                f"device_id: got {config.device_id}, but this machine has no accelerator; leave it out to train on CPU"
            )
        return chosen
    for parameter in module.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            return parameter.device
    current = accelerator()
    if current is not None and serves(config.process_group, current):
        return current
    return torch.device("cpu")


def move_buffers(modules: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
    for _, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


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
        unit.write_back()
        unit.reset_to_idle()
        unit.evict_all()
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


def check_registered(module: nn.Module, units: Sequence[Unit]) -> None:
    """Refuse to compute with parameters of `module` that were registered after wrapping: none of its units holds them.

    Raises:
        UsageError: naming all of them.
    """
    found = unmanaged_parameters(module, units)
    if found:
        raise UsageError(
            f"these parameters were registered after wrapping: {', '.join(found)}. No unit holds them, so they are not "
            "sharded and their gradients are not averaged over ranks. Register them before wrapping; what is to stay "
            "outside goes into a module that ignored_modules= names"
        )


def check_placed(root: nn.Module, units: Sequence[Unit], device: torch.device) -> None:
    """Refuse to compute while something of `root` is on the meta device, or on another one than `device`, where its
    units compute.

    Ignored parameters and buffers may be on any real device: they are the user's.

    Raises:
        UsageError: naming all of them.
    """
    on_meta: list[str] = []
    elsewhere: list[str] = []
    managed: set[int] = set()
    for unit in units:
        for handle in unit.handles:
            managed.update(map(id, handle.leaves))
            managed.add(id(handle.flat_param))
            found, expected = handle.shard.device, torch.device("cpu") if handle.options.offload else device
            for spec in handle.layout.params:
                if found.type == "meta":
                    on_meta.append(unit.prefix + spec.name)
                elif found != expected:
                    elsewhere.append(f"{unit.prefix}{spec.name} ({found}, expected {expected})")
        for module in unit.modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device != device:
                    elsewhere.append(f"buffer {name} of {type(module).__name__} ({buffer.device})")
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        if tensor.is_meta and id(tensor) not in managed:
            on_meta.append(name)
    if on_meta:
        raise UsageError(
            f"these parameters or buffers are on the meta device, which has no values: {', '.join(on_meta)}. Modules "
            "that are wrapped are given memory by the constructor; what is ignored, or moved to the meta device after "
            "wrapping, is yours to initialise before the first forward"
        )
    if elsewhere:
        raise UsageError(
            f"the model computes on {device}, but these are elsewhere: {', '.join(elsewhere)}. Move the "
            "whole model with model.to(device) before wrapping, or pass device_id="
        )
