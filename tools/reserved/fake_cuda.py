"""A card that does not exist: tensors without memory, streams that run nothing, and an allocator that counts.

    with FakeCuda() as card:
        model = nn.Linear(1024, 1024, device=DEVICE)
        model(torch.ones(1, 1024, device=DEVICE)).sum().backward()
    card.allocator.reserved.peak

[Note: device] A torch without CUDA computes no gradients on a device of CUDA, fake or not. So the device is of another
type, "lazy": torch takes it for no accelerator, and runs its backward in the thread that calls it. Engines see a module
`torch.lazy` with the interface of `torch.cuda`.

[Note: storages] Tensors are torch's fake tensors, whose storages have a size and no memory. Each new storage takes a
block of the allocator's model on the stream that is current in the thread that made it, and gives it back when torch
frees the storage, or resizes it to nothing. Operations dispatch as on a real device, so temporaries between them are
seen; those within one kernel are not (`assumed`). Where autograd adds up gradients in place on a device, but not with
fake tensors, it does so here.

[Note: progress] Whether the device has passed an event decides when memory that `record_stream` was called for is free.
Either the device keeps up with the host and has passed every event, or it never does by itself: then the host knows of
what it has waited for, and what was ordered before that.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .allocator import Allocator, Block, Settings

KIND = "lazy"
DEVICE = torch.device(KIND, 0)
LAZY, META = 17, 14  # places of these devices in torch's table of devices

ALONE = 2  # uses of a storage that one tensor has
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


class Clock(dict["FakeStream", int]):
    """The last tick of each stream that is known to be passed."""

    def learn(self, other: Clock) -> None:
        for stream, tick in other.items():
            self[stream] = max(self.get(stream, 0), tick)


class FakeEvent:
    """A point in a stream, once recorded."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.clock = Clock()
        self.at: tuple[FakeStream, int] | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or card().current_stream()
        stream.clock[stream] += 1
        self.clock, self.at = Clock(stream.clock), (stream, stream.clock[stream])

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or card().current_stream()).wait_event(self)

    def query(self) -> bool:
        return card().is_past(self)

    def synchronize(self) -> None:
        card().host.learn(self.clock)


class FakeStream:
    """An order of operations; named in the order of creation."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.name = card().name_of_new_stream()
        self.clock = Clock({self: 0})
        self.device = DEVICE

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.clock.learn(event.clock)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return self.record_event().query()

    def __repr__(self) -> str:
        return self.name


_entered: list[FakeCuda] = []


def card() -> FakeCuda:
    """The device in use."""
    return _entered[-1]


class FakeCuda:
    """The device, while it is entered as a context.

    Attributes:
        allocator: the memory.
        host: what the host knows to be passed.
        keeps_up: whether the device has passed every event that it is asked about. [Note: progress]
    """

    Stream, Event = FakeStream, FakeEvent

    def __init__(self, settings: Settings | None = None, *, keeps_up: bool = True) -> None:
        self.keeps_up = keeps_up
        self.host = Clock()
        self._streams = 0
        self._thread = threading.local()
        self._stack = ExitStack()
        self.allocator = Allocator(
            settings, mark=lambda stream: stream.record_event(), is_past=self.is_past, wait=FakeEvent.synchronize
        )
        self.memory = Memory(self)

    def __enter__(self) -> FakeCuda:
        _accept_the_device()
        _entered.append(self)
        self._default = FakeStream()
        self._stack.enter_context(patch.object(torch, KIND, self, create=True))
        self._stack.enter_context(patch.object(torch, "is_autocast_enabled", lambda *kind: False))
        self._stack.enter_context(patch.object(torch.UntypedStorage, "resize_", self.memory.resizing()))
        self._stack.enter_context(patch.object(torch.Tensor, "record_stream", record_stream))
        self._stack.enter_context(self.memory)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()
        _entered.remove(self)

    # -- the interface of torch.cuda -----------------------------------------------------------------------------------

    def current_stream(self, device: Any = None) -> FakeStream:
        streams: list[FakeStream] = self._thread.__dict__.setdefault("streams", [])
        return streams[-1] if streams else self._default

    def default_stream(self, device: Any = None) -> FakeStream:
        return self._default

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        streams = self._thread.__dict__.setdefault("streams", [])
        streams.append(stream)
        try:
            yield
        finally:
            streams.pop()

    def synchronize(self, device: Any = None) -> None:
        for stream in [*self.host, self._default]:
            stream.synchronize()

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

    # ------------------------------------------------------------------------------------------------------------------

    def is_past(self, event: FakeEvent) -> bool:
        """Whether the device has passed `event`."""
        return self.keeps_up or event.at is None or self.host.get(event.at[0], 0) >= event.at[1]

    def name_of_new_stream(self) -> str:
        self._streams += 1
        return "compute" if self._streams == 1 else f"stream {self._streams - 1}"


class Held:
    """The memory of one storage: a block, or none while its size is 0."""

    def __init__(self) -> None:
        self.block: Block | None = None


class Memory(FakeTensorMode):
    """Fake tensors whose storages take blocks. [Note: storages]

    Attributes:
        label: makes the label of a new block from the operation's name.
        after: called after each operation of the device, with its name and its arguments.
    """

    def __init__(self, card: FakeCuda) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.stand_ins: dict[int, Any] = {}  # the engine's, in its dry runs
        self.label: Callable[[str], Any] = str
        self.after: Callable[[str, Any], object] = lambda name, args: None
        self._card = card
        self._inside = False
        self._held: dict[weakref.ref[torch.UntypedStorage], Held] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:  # within an operation that torch computes by others
            return super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if _is_of_host(name, args, kwargs):
            return func(*args, **kwargs)
        if name == "equal":  # no values: taken for different
            return False
        if name == "add" and _accumulates(func, args):
            func = torch.ops.aten.add_.Tensor
        self._inside = True
        self.cache_enabled = name != "set_"  # whose entry would keep the storage
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._inside = False
        for tensor in tensors_of(result):
            if tensor.fake_device.type == KIND:
                self._seen(tensor.untyped_storage(), name)
        self.after(name, args)
        return result

    def resizing(self) -> Callable[[torch.UntypedStorage, int], Any]:
        """`UntypedStorage.resize_`, by which memory is allocated and freed while tensors stay."""
        resize: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            held = self._held.get(weakref.ref(storage))
            result = resize(storage, size)
            if held is not None:
                before = held.block
                held.block = self._malloc(size, "resize_") if size else None
                if before is not None:
                    self._card.allocator.free(before)
            return result

        return resized

    def recorded(self, tensor: Tensor, stream: FakeStream) -> None:
        """`stream` uses `tensor`, by `record_stream`."""
        held = self._held.get(weakref.ref(tensor.untyped_storage()))
        if held is not None and held.block is not None:
            self._card.allocator.record_stream(held.block, stream)

    def take(self, size: int, label: Any) -> Block:
        """Memory that no tensor shows."""
        return self._card.allocator.malloc(size, self._card.current_stream(), label)

    def give(self, block: Block) -> None:
        """Give memory back that was taken."""
        self._card.allocator.free(block)

    @property
    def stream(self) -> FakeStream:
        """The current stream."""
        return self._card.current_stream()

    def _malloc(self, size: int, name: str) -> Block:
        return self._card.allocator.malloc(size, self._card.current_stream(), self.label(name))

    def _seen(self, storage: torch.UntypedStorage, name: str) -> None:
        reference = weakref.ref(storage, self._died)
        if reference in self._held:
            return
        held = self._held[reference] = Held()
        if storage.nbytes():
            held.block = self._malloc(storage.nbytes(), name)

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        held = self._held.pop(reference, None)
        if held is not None and held.block is not None:
            self._card.allocator.free(held.block)


def record_stream(tensor: Tensor, stream: FakeStream) -> None:
    """In the place of `Tensor.record_stream`."""
    card().memory.recorded(tensor, stream)


def _accept_the_device() -> None:
    """Let operators switch to the device, which nothing implements here: as on the meta device, that does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (LAZY + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[LAZY] = guards[META]


def tensors_of(value: Any) -> Iterator[FakeTensor]:
    """The fake tensors in a result."""
    if isinstance(value, FakeTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_of(each)


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


def _accumulates(func: Any, args: Any) -> bool:
    """Whether autograd itself adds two gradients: on a device it does so in place, if nothing else holds the first."""
    if func is not torch.ops.aten.add.Tensor or _BACKWARD not in islice(_callers(), 5):
        return False
    return bool(torch._C._storage_Use_Count(args[0].untyped_storage()._cdata) <= ALONE)


def _callers() -> Iterator[CodeType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back
