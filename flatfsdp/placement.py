"""Where parameters and buffers are, and in which dtype: the device of a unit, and `.to()` and its like on a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .api import Config
from .device import accelerator
from .errors import ConfigValueError, UsageError
from .groups import serves
from .unit import Unit


def compute_device(module: nn.Module, config: Config) -> torch.device:
    """Where the unit computes: `device_id`; else where parameters on an accelerator are; else what the group serves."""
    if isinstance(config.device_id, torch.device):
        return config.device_id
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
        UsageError: while a forward awaits its backward, and for a move to the meta device.
    """
    unit: Unit = wrapper.__dict__["_unit"]
    if not unit.is_between():
        raise UsageError(
            f"unit {unit.label}: .to(), .half() and their like change parameters between iterations only; a forward "
            "here still awaits its backward"
        )
    if any(change(handle.shard.new_empty(0)).is_meta for handle in unit.handles):
        raise UsageError(
            f"unit {unit.label}: moving it to the meta device would throw away its values; use "
            "model.to_empty(device=...) for memory without values, or wrap a module that is on the meta device"
        )
    unit.write_back()
    unit.rest()
    flat = {name: wrapper._parameters.pop(name) for name in list(wrapper._parameters) if name.startswith("_flat_param")}
    homes, hidden = (*unit.homes, *unit.aliases), unit.hidden
    for home in homes:
        home.unregister()
    try:
        rest()
    finally:
        for home in homes:
            if not any(home is other for other in hidden):
                home.register()
        wrapper._parameters.update(flat)
    with torch.no_grad():
        for handle, shown in zip(unit.handles, unit.shown, strict=True):
            changed = change(handle.shard)
            if changed is not handle.shard:
                shown.replace_shard(changed.detach())
    unit.root.placed = False
