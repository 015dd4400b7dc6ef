"""The checks of a model before its first collective, and after a move: that all parameters are in a unit, that all
tensors are on the device where it computes, and that units fit together."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..agreement.once_per_job import warn_once_per_job
from ..base.events import Observer
from ..flat.flat_param import FlatParamHandle
from ..models.walks import unmanaged_parameters
from ..runtime.unit import Unit
from .assignments import without_values
from .enclosing_ddp import check_enclosing
from .fast_paths import keep_out_inside
from .late_ties import follow_ties


class SetupChecks(Observer):
    """The checks of one model.

    Args:
        units: its units, which were just laid out.
    """

    def __init__(self, units: Iterable[Unit]) -> None:
        self._declared: weakref.WeakKeyDictionary[FlatParamHandle, list[Any]] = weakref.WeakKeyDictionary()
        for handle in (handle for unit in units for handle in unit.handles):
            self._declared[handle] = _declared_in(handle)

    def setup_begins(self, units: Sequence[Unit]) -> None:
        """Refuse `units` that do not fit together, and follow what was done to the model after they were built."""
        keep_out_inside(units)
        check_hooked(units)
        check_targets(units)
        check_enclosing(units)
        for unit in units:
            self._check_declared(unit)
        follow_ties([unit for unit in units if unit.entries.in_place])
        if not any(unit.handles for unit in units):
            warn_once_per_job(
                f"{units[-1].entries.class_name} is wrapped, but no unit of it has parameters: they are all "
                "ignored, or there are none. Nothing is sharded, and no gradient is averaged"
            )

    def _check_declared(self, unit: Unit) -> None:
        """Refuse grains that parameters have declared too late."""
        for handle in unit.handles:
            found = _declared_in(handle)
            for spec, before, now in zip(handle.layout.params, self._declared.get(handle, found), found, strict=True):
                if before != now:
                    raise UsageError(
                        f"parameter {spec.name!r} of unit {unit.label}: fsdp_grain was {before} when it was wrapped, "
                        f"and is {now} now. Its shards lie as they are: set it before wrapping, with "
                        "layout=flatfsdp.layout.declared"
                    )

    def placed(self, units: Sequence[Unit], device: torch.device) -> None:
        """Refuse tensors in no unit, or elsewhere than on `device`."""
        module = units[-1].entries.first
        check_registered(module, units)
        check_placed(module, units, device)


def _declared_in(handle: FlatParamHandle) -> list[Any]:
    return [vars(leaf).get("fsdp_grain") for leaf in handle.leaves]


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
        for handle in unit.handles:
            managed.update(map(id, handle.parameters))
            found, expected = handle.shard.device, torch.device("cpu") if handle.options.offload else device
            without = without_values(handle)
            for index, spec in enumerate(handle.layout.params):
                if found.type == "meta" or index in without:
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
