"""A card that does not exist, for engines that know nothing of dry runs: tensors on a device without kernels.

    with FakeCuda() as card:
        model = nn.Linear(1024, 1024, device=DEVICE)
        model(torch.ones(1, 1024, device=DEVICE)).sum().backward()
    card.allocator.reserved.peak

[Note: device] A torch without CUDA computes no gradients on a device of CUDA, fake or not. So the device is of another
type, "lazy": torch takes it for no accelerator, and runs its backward in the thread that calls it. Engines see a module
`torch.lazy` with the interface of `torch.cuda`. The device keeps up with the host: it has passed every event that it is
asked about.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flatfsdp.engine.base._torch import is_sum_of_autograd
from flatfsdp.engine.inspection.allocator import Settings
from flatfsdp.engine.inspection.simulated import SimulatedDevice, SimulatedEvent, SimulatedStream, Storages, fakes_in

KIND = "lazy"
DEVICE = torch.device(KIND, 0)
LAZY, META = 17, 14  # places of these devices in torch's table of devices


class FakeEvent(SimulatedEvent):
    """A point in a stream, which the device has passed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    wait = record

    def query(self) -> bool:
        return True


class FakeStream(SimulatedStream):
    """A stream of the device; its operations are finished at once."""

    device = DEVICE

    def __init__(self, *args: Any, priority: int = 0, **options: Any) -> None:
        super().__init__(priority=priority)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class FakeCuda(SimulatedDevice):
    """The device, while it is entered as a context."""

    Stream, Event = FakeStream, FakeEvent  # type: ignore[assignment]

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings or Settings())
        self._current = [FakeStream()]
        self._default = self._current[0]
        self._stack = ExitStack()
        self.memory = Memory(self.storages)

    def __enter__(self) -> FakeCuda:
        _accept_the_device()
        self._stack.enter_context(patch.object(torch, KIND, self, create=True))
        self._stack.enter_context(patch.object(torch, "is_autocast_enabled", lambda *kind: False))
        self._stack.enter_context(patch.object(torch.Tensor, "record_stream", self.record_stream))
        self._stack.enter_context(self.storages.resizing())
        self._stack.enter_context(self.memory)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    @property
    def record_stream(self) -> Callable[[Tensor, Any], None]:
        """In the place of `Tensor.record_stream`."""

        def record(tensor: Tensor, stream: Any) -> None:
            if (block := self.storages.of(tensor.untyped_storage())) is not None:
                self.allocator.record_stream(block, stream)

        return record

    # -- the interface of torch.cuda, beyond that of a simulated device ------------------------------------------------

    def default_stream(self, device: Any = None) -> Any:
        return self._default

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        with super().stream(stream or self.current_stream()):
            yield

    def synchronize(self, device: Any = None) -> None:
        pass

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def set_device(self, device: Any) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1


class Memory(FakeTensorMode):
    """Fake tensors whose storages take blocks. [Note: simulated memory]

    Attributes:
        after: called after each operation of the device, with its function and its arguments.
    """

    def __init__(self, storages: Storages) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.stand_ins: dict[int, Any] = {}  # the engine's, in its dry runs
        self.storages = storages
        self.after: Callable[[Any, Any], object] = lambda func, args: None
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:  # within an operation that torch computes by others
            return super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if _is_of_host(name, args, kwargs):
            return func(*args, **kwargs)
        if name == "equal":  # no values: taken for different
            return False
        if name == "add" and is_sum_of_autograd(func, args):
            func = torch.ops.aten.add_.Tensor
        self._inside = True
        self.cache_enabled = name != "set_"  # whose entry would keep the storage
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._inside = False
        for tensor in fakes_in(result):
            if tensor.fake_device.type == KIND:
                self.storages.hold(tensor.untyped_storage(), name)
        self.after(func, args)
        return result


def _accept_the_device() -> None:
    """Let operators switch to the device, which nothing implements here: as on the meta device, that does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (LAZY + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[LAZY] = guards[META]


def _is_of_host(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation has only real inputs, or creates a small tensor on the CPU whose values are read."""
    found = [each for arg in (*args, *kwargs.values()) for each in (arg if isinstance(arg, (list, tuple)) else [arg])]
    tensors = [each for each in found if isinstance(each, Tensor)]
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    if tensors:
        return not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)
    if args and isinstance(args[0], (list, tuple)) and not args[0]:  # the shape of a single number
        return True
    dtype = kwargs.get("dtype")
    return dtype in (torch.int32, torch.int64) or (dtype is None and name == "arange")
