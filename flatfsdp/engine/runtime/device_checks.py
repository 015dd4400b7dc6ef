"""Devices of parameters and buffers: the device of a unit, and the checks before a forward that all parameters are in a
unit, and that all tensors are on the device where it computes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from ...api import Config
from ...errors import ConfigValueError, UsageError
from ..comm.axes import serves
from ..device.fake_tensors import is_memoryless
from ..device.streams import accelerator, concrete
from .module_tree import unmanaged_parameters
from .unit import Unit


def compute_device(module: nn.Module, config: Config) -> torch.device:
    """The device on which the unit computes: `device_id`; else that of a parameter on an accelerator; else the one that
    the process group supports. In a dry run it is always the CPU, which every machine has.
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


def check_registered(module: nn.Module, units: Sequence[Unit], among: Collection[int] | None = None) -> None:
    """Check that no parameters of `module` were registered after wrapping, so that none of its units holds them.

    Args:
        module, units: the outermost one, and all of its model.
        among: the ids of the parameters to check; None for all.

    Raises:
        UsageError: names all of them.
    """
    unmanaged = unmanaged_parameters(module, units)
    found = [name for name, parameter in unmanaged.items() if among is None or id(parameter) in among]
    if found:
        raise UsageError(
            f"these parameters were registered after wrapping: {', '.join(found)}. No unit holds them, so they are not "
            "sharded and their gradients are not averaged over ranks. Register them before wrapping, or keep them "
            "outside, in a module that ignored_modules= lists"
        )


def check_placed(outermost: nn.Module, units: Sequence[Unit], device: torch.device) -> None:
    """Check that no parameters or buffers of `outermost` are on the meta device, or on another one than `device`, where
    its units compute.

    Ignored parameters and buffers may be on any real device.

    Raises:
        UsageError: names all of them.
    """
    on_meta: list[str] = []
    elsewhere: list[str] = []
    managed: set[int] = set()
    for unit in units:
        for handle, views, _ in unit.kinds:
            managed.update(map(id, handle.parameters))
            found, expected = handle.shard.device, torch.device("cpu") if handle.options.offload else device
            for index, spec in enumerate(handle.layout.params):
                if found.type == "meta" or index in views.without_values:
                    on_meta.append(unit.entries.fqn(spec.name))
                elif found != expected:
                    elsewhere.append(f"{unit.entries.fqn(spec.name)} ({found}, expected {expected})")
        for module in unit.built.modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device != device:
                    elsewhere.append(f"buffer {name} of {type(module).__name__} ({buffer.device})")
    for name, tensor in [*outermost.named_parameters(), *outermost.named_buffers()]:
        if tensor.is_meta and id(tensor) not in managed:
            on_meta.append(name)
    in_place = any(unit.entries.in_place for unit in units)
    remedy = (
        "Allocate them with model.to_empty(device=...) and then initialize them, or load a complete state dict with "
        "assign=True"
        if in_place
        else "The constructor allocates and initializes wrapped modules; initialize ignored modules, and tensors "
        "that are moved to the meta device after wrapping, before the first forward"
    )
    if on_meta:
        raise UsageError(
            f"these parameters or buffers are on the meta device, which has no values: {', '.join(on_meta)}. {remedy}"
        )
    if elsewhere:
        remedy = (
            "Move them with .to(), or with to_empty() from the meta device; offloaded parameters stay on the CPU"
            if in_place
            else "Move the whole model with model.to(device) before wrapping, or pass device_id="
        )
        found_where = f"the model computes on {device}, but these are elsewhere: {', '.join(elsewhere)}"
        raise UsageError(f"{found_where}. {remedy}")


def check_hooked(units: Iterable[Unit]) -> None:
    """Check that all `units` of a model, or none of them, have a communication hook.

    Raises:
        UsageError: the model was wrapped again after a hook had been registered.
    """
    units = list(units)
    without = [unit for unit in units if unit.options.comm_hook is None]
    if without and len(without) < len(units):
        raise UsageError(
            f"a communication hook was registered on a part of this model, before the whole model was wrapped: unit "
            f"{without[0].label} has none. Wrap the whole model, then call register_comm_hook() on it, once"
        )


def check_targets(units: Sequence[Unit]) -> None:
    """Check that units list only units of the same model to be gathered ahead.

    Raises:
        UsageError: names one of another model.
    """
    for unit in units:
        for target in (*unit.options.forward_targets.units(), *unit.options.backward_targets.units()):
            if target not in units:
                raise UsageError(
                    f"unit {unit.label} lists a {target.entries.class_name} to be prefetched, which is not part of the "
                    "model that runs. List modules inside the same outermost one"
                )
