"""From the meta device to memory and values, on the device on which a unit computes.

[Note: materialization] A parameter on the meta device gets its memory in place: it stays the same object, so that ties
inside a unit and across units, and optimizers that hold it, survive. A module whose initialization raises is put back
on the meta device, so that wrapping it can be tried again. `param_init_fn` still sees it on the meta device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...api import Config
from ...errors import ConfigValueError, UsageError, label_of
from ..agreement.process_groups import serves
from ..base.overrides import is_memoryless
from ..device.streams import accelerator
from ..dtensor.gather_hooks import has_gather_hooks, rebuilt
from ..features.fake_tensors import stand_in
from ..runtime.unit import Unit

_META = torch.device("meta")
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_DEVICE = torch.Tensor.device.__get__
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_ONLY_LOOK = {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point}


def materialize(
    modules: Iterable[tuple[str, nn.Module]],
    device: torch.device,
    initialize: Callable[[nn.Module], Any] | None,
    *,
    skip: set[nn.Parameter],
    owner_of: Callable[[torch.Tensor], Unit | None],
) -> None:
    """Give memory and values to modules that hold parameters or buffers on the meta device.

    `initialize(module)` is called for each, or the module's `reset_parameters()`. The module's tensors on other devices
    keep their values. Parameters in `skip` are left unchanged; those with an owner belong to a unit already.
    """
    if is_memoryless():
        _forget_values(modules, device, skip)
        return
    for path, module in modules:
        if not any(tensor.is_meta and tensor not in skip for _, _, tensor in _held(module)):
            continue
        if initialize is None and not callable(getattr(module, "reset_parameters", None)):
            raise UsageError(
                f"module {label_of(path)} ({type(module).__name__}) is on the meta device and has no "
                "reset_parameters(); define that method, or pass param_init_fn=, a function that takes a module and "
                "initializes the module's own parameters and buffers"
            )
        with torch.no_grad(), ExitStack() as undo, ExitStack() as after:
            given: set[int] = set()
            from_meta: list[str] = []
            for registry, name, tensor in _held(module):
                if id(tensor) in given:  # tied within the module
                    continue
                given.add(id(tensor))
                if tensor.is_meta and tensor not in skip:
                    undo.callback(_give_memory(module, tensor, device))
                    from_meta.append(name)
                elif (owning_unit := owner_of(tensor)) is not None:
                    after.callback(_substitute_stand_in(registry, name, tensor, owning_unit))
                else:
                    after.callback(tensor.copy_, tensor.clone())
            if initialize is None:
                module.reset_parameters()  # type: ignore[operator]  # checked above
            else:
                _initialize_by(initialize, module, path, from_meta)
            left = [name for _, name, tensor in _held(module) if tensor.is_meta and tensor not in skip]
            if left:
                raise UsageError(
                    f"param_init_fn left {', '.join(left)} of module {label_of(path)} on the meta device, without "
                    "values. It must allocate memory for them, for example with module.to_empty(device=..., "
                    "recurse=False), and initialize them"
                )
            undo.pop_all()


def replace_referenced(
    modules: Iterable[tuple[str, nn.Module]],
    *,
    skip: set[nn.Parameter],
    owner_of: Callable[[torch.Tensor], Unit | None],
) -> list[nn.Parameter]:
    """Replace parameters on the meta device that have weak references, as recurrent modules keep them: such a parameter
    cannot get memory later as the same object. Returns the replaced ones. A parameter with an owner, which is tied to
    one of another unit, stays."""
    made: dict[int, nn.Parameter] = {}  # tied ones stay tied
    replaced: list[nn.Parameter] = []
    for _, module in modules:
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta or parameter in skip:
                continue
            if id(parameter) not in made:
                if not weakref.getweakrefcount(parameter) or owner_of(parameter) is not None:
                    continue
                other = nn.Parameter(parameter.detach(), parameter.requires_grad)
                other.__class__ = type(parameter)
                vars(other).update(vars(parameter))
                made[id(parameter)] = other
                replaced.append(parameter)
            setattr(module, name, made[id(parameter)])  # such modules update their references on assignment
    return replaced


def _forget_values(modules: Iterable[tuple[str, nn.Module]], device: torch.device, skip: set[nn.Parameter]) -> None:
    """In a dry run no tensor has memory, on any device, and none needs to be initialized."""
    for _, module in modules:
        for _, name, tensor in _held(module):
            if tensor in skip:
                continue
            if not has_gather_hooks(tensor):
                setattr(module, name, stand_in(tensor, device))
            elif hasattr(tensor, "__tensor_flatten__"):  # others are refused
                setattr(module, name, rebuilt(tensor, partial(stand_in, device=device)))


def _held(module: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """(registry, name, tensor) of the parameters and buffers that `module` itself holds."""
    return [
        (registry, name, tensor)
        for registry in (module._parameters, module._buffers)
        for name, tensor in registry.items()
        if tensor is not None
    ]


def _give_memory(module: nn.Module, tensor: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Memory on `device` for `tensor`, with undefined values; returns a function that undoes it."""
    empty = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        if type(empty) is nn.Parameter:
            empty.__class__ = type(tensor)
    vars(empty).update(vars(tensor))  # attributes of its class, such as the state of a quantized weight
    try:
        torch.utils.swap_tensors(tensor, empty)
        return lambda: torch.utils.swap_tensors(tensor, empty)
    except RuntimeError:
        # Weak references prevent it. Modules that hold them (LSTM) update them on assignment.
        names = [name for _, name, other in _held(module) if other is tensor]

        def put(value: torch.Tensor) -> None:
            for name in names:
                setattr(module, name, value)

        put(empty)
        return lambda: put(tensor)


def _substitute_stand_in(
    registry: dict[str, Any], name: str, leaf: torch.Tensor, owning_unit: Unit
) -> Callable[[], None]:
    """A scratch tensor of the full shape in place of `leaf`, of which `owning_unit` shows a shard; returns a function
    that ends it."""
    handle, index = next(
        (handle, index)
        for handle in owning_unit.handles
        for index, other in enumerate(handle.face.originals)
        if other is leaf
    )
    scratch = torch.empty(handle.layout.params[index].shape, dtype=handle.shard.dtype, device=handle.device)
    registry[name] = nn.Parameter(scratch, requires_grad=leaf.requires_grad)
    return lambda: registry.__setitem__(name, leaf)


def _initialize_by(initialize: Callable[[nn.Module], Any], module: nn.Module, path: str, names: list[str]) -> None:
    """Call `initialize` as if the tensors of these names were still on the meta device.

    A function that reads their devices, to create other tensors there, must see the true ones. So they are shown as
    meta only if it has done nothing.
    """
    tensors = [getattr(module, name) for name in names]
    for device in (False, True):
        with _MetaDeviceMode(tensors, device=device) as reported:
            initialize(module)
        untouched = reported.untouched()
        replaced = any([getattr(module, name) is not tensor for name, tensor in zip(names, tensors, strict=True)])
        if replaced or len(untouched) < len(tensors) or not any(tensor.numel() for tensor in tensors):
            return
    raise UsageError(
        f"param_init_fn did nothing with {', '.join(names)} of module {label_of(path)} ({type(module).__name__}), "
        "which were on the meta device and would have no values. Initialize them in place or, if values are loaded "
        "later, call module.to_empty(device=..., recurse=False)"
    )


class _MetaDeviceMode(TorchFunctionMode):
    """A context in which the device of `tensors` appears to be meta, for each until it is used.

    Programs guard initialization functions by `if not parameter.is_meta: return`, so that tensors initialized
    elsewhere keep their values. Taken literally, that would leave parameters without any.

    Code that creates tensors like them reads their device, which is the true one unless `device` is set.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, device: bool) -> None:
        super().__init__()
        self._as_they_were = [(tensor, tensor.data_ptr(), tensor._version) for tensor in tensors]
        self._unused = {id(tensor) for tensor, _, _ in self._as_they_were}
        self._answers: dict[Any, Any] = {_IS_META: True, **({_DEVICE: _META} if device else {})}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._answers and id(args[0]) in self._unused:
            return self._answers[func]
        if func == _DATA or not (func in _ONLY_LOOK or getattr(func, "__name__", "") == "__get__"):
            for each in (*args, *(kwargs or {}).values()):
                self._unused.difference_update(map(id, each if isinstance(each, (list, tuple)) else (each,)))
        return func(*args, **(kwargs or {}))

    def untouched(self) -> list[torch.Tensor]:
        """The tensors that no function of torch used, and whose memory and versions are unchanged."""
        return [
            tensor
            for tensor, address, version in self._as_they_were
            if id(tensor) in self._unused and (tensor.data_ptr(), tensor._version) == (address, version)
        ]


def compute_device(module: nn.Module, config: Config) -> torch.device:
    """The device on which the unit computes: `device_id`; else that of a parameter on an accelerator; else the one that
    the process group supports. In a dry run it is always the CPU, which every machine has.
    """
    if is_memoryless():
        return torch.device("cpu")
    if isinstance(config.device_id, torch.device):
        named, here = _concrete(config.device_id), accelerator()
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


def _concrete(device: torch.device) -> torch.device:
    """`device` as the `device` of tensors shows it: a CPU without index, an accelerator with one (of the current)."""
    if device.type == "cpu":
        return torch.device("cpu")
    current = accelerator() if device.index is None else None
    return current if current is not None and current.type == device.type else device


def move_buffers(modules: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
    for _, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
