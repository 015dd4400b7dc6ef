"""A simulated accelerator: streams that run nothing, and storages that take memory from a model of torch's allocator.

[Note: simulated memory] Tensors of a dry run have no memory, but their storages have a size. Each new storage takes a
block of the allocator's model (`allocator.py`) on the stream that is current, and gives it back when torch frees the
storage, or resizes it to nothing. Operations dispatch as on a real device, so temporary tensors between them are seen;
those within one kernel are not, and are assumed (`assumed.py`).

[Note: simulated host] All tensors of a dry run show one device, so those in host memory are known by their storages,
which have a size and no block: the engine allocates them in `in_host_memory()`, and what an operation makes of tensors
on the host alone, as an optimizer's states, is there, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ..base import _torch
from ..base.overrides import Override
from .allocator import Allocator, Block, Settings


class SimulatedEvent:
    """A point in a stream, which the device is never found to have passed; a wait for it takes no time."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


class SimulatedStream:
    """A stream without operations."""

    def __init__(self, *, priority: int = 0) -> None:
        self.priority = priority

    @property
    def cuda_stream(self) -> int:
        return id(self)

    def record_event(self) -> SimulatedEvent:
        return SimulatedEvent()

    def wait_event(self, event: SimulatedEvent) -> None:
        pass

    def wait_stream(self, stream: SimulatedStream) -> None:
        pass


class SimulatedDevice:
    """The interface of `torch.cuda` to an accelerator that need not exist: no operation is ever found to be finished.

    Attributes:
        allocator: its memory; storages: the tensors that have some of it.
        observers: called after each operation, with its function, arguments and result.
        label: makes the label of a new block.
    """

    def __init__(self, settings: Settings) -> None:
        self._current = [SimulatedStream()]
        self.allocator = Allocator(settings)
        self.storages = Storages(self.allocator, self.current_stream)
        self.observers: list[Callable[[Any, Any, Any], object]] = []
        self.label: Callable[[], Any] = lambda: None

    def computed(self, func: Any, args: Any, result: Any) -> None:
        """Give new tensors in the `result` of an operation memory."""
        inputs = [each.untyped_storage() for each in fakes_in(args)]
        with self.in_host_memory() if inputs and all(map(self.storages.on_host, inputs)) else nullcontext():
            for tensor in fakes_in(result):
                if tensor.fake_device.type != "meta":
                    self.storages.hold(tensor.untyped_storage(), self.label())
        for observe in self.observers:
            observe(func, args, result)

    def Stream(self, device: Any = None, *, priority: int = 0) -> SimulatedStream:
        return SimulatedStream(priority=priority)

    def current_stream(self, device: Any = None) -> SimulatedStream:
        return self._current[-1]

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def in_host_memory(self) -> AbstractContextManager[None]:
        """A context in which storages get no memory of the device. [Note: simulated host]"""
        return self.storages.takes_none.being(True)

    def get_allocator_backend(self) -> str:
        return "native"

    def memory_allocated(self, device: Any = None) -> int:
        return self.allocator.allocated.now

    def memory_reserved(self, device: Any = None) -> int:
        return self.allocator.reserved.now

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        capacity = self.allocator.settings.capacity
        return capacity - self.allocator.reserved.now, capacity

    def memory_snapshot(self, *, include_traces: bool = True) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for block in self.allocator.cached():
            stream: Any = block.stream
            blocks = [{"size": block.size, "state": "inactive"}]
            found.append({"device": 0, "stream": stream.cuda_stream, "segment_pool_id": (0, 0), "blocks": blocks})
        return found


def fakes_in(value: Any) -> Iterator[Any]:
    """The fake tensors in the result of an operation."""
    if isinstance(value, _torch.fake_tensors().FakeTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from fakes_in(each)


class Storages:
    """The blocks that storages have. [Note: simulated memory]"""

    def __init__(self, allocator: Allocator, current_stream: Callable[[], Hashable]) -> None:
        self.allocator, self._current_stream = allocator, current_stream
        self._blocks: dict[weakref.ref[torch.UntypedStorage], Block | None] = {}
        self.takes_none = Override(False)

    def hold(self, storage: torch.UntypedStorage, label: Any = None) -> None:
        """Give `storage` memory, if it is new."""
        reference = weakref.ref(storage, self._died)
        if reference not in self._blocks:
            self._blocks[reference] = self.take(storage.nbytes(), label)

    def of(self, storage: torch.UntypedStorage) -> Block | None:
        """The block of `storage`; None if it is empty, or not on the device."""
        return self._blocks.get(weakref.ref(storage))

    def on_host(self, storage: torch.UntypedStorage) -> bool:
        """Whether `storage` is in host memory. [Note: simulated host]"""
        return self._blocks.get(weakref.ref(storage), 0) is None and storage.nbytes() > 0

    def take(self, size: int, label: Any) -> Block | None:
        """Memory on the current stream; None for 0 bytes, and in host memory."""
        if not size or self.takes_none.value:
            return None
        return self.allocator.malloc(size, self._current_stream(), label)

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """A context in which `UntypedStorage.resize_` allocates and frees memory while tensors stay."""
        storages: Any = torch.UntypedStorage
        resize = storages.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            reference = weakref.ref(storage)
            result = resize(storage, size)
            if reference in self._blocks:
                before, self._blocks[reference] = self._blocks[reference], self.take(size, "resize_")
                if before is not None:
                    self.allocator.free(before)
            return result

        storages.resize_ = resized
        try:
            yield
        finally:
            storages.resize_ = resize

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        block = self._blocks.pop(reference, None)
        if block is not None:
            self.allocator.free(block)
