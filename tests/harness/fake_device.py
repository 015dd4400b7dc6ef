"""A double of `torch.cuda` that finds races: streams that run nothing, over real CPU tensors.

    with FakeDevice() as device:
        model = FullyShardedDataParallel(...)
        model(x).sum().backward()
    assert device.races == []

[Note: happens before] The host issues operations in the right order, so results are right even if the engine forgets
to synchronize; an accelerator only guarantees the order within one stream, and between streams that of events. So every
operation that torch dispatches is a tick of the current stream's clock, every stream knows which ticks of the others
precede its next operation, and events carry that knowledge. A read must know the last write, a write must know all
accesses. Freed memory returns to the stream that it was allocated on, which must know all accesses by then: torch's
allocator may reuse it at once. An asynchronous collective runs on the backend's own stream, after the operations issued
so far on the current one; waiting for it passes its knowledge to the current stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatfsdp.engine.base.wait_limits import issued
from flatfsdp.engine.comm import process_group_transport
from flatfsdp.engine.device import streams as seam
from flatfsdp.engine.device.memory import FlatBuffer
from flatfsdp.engine.transports import staged


@dataclass(frozen=True)
class Access:
    """One operation: its name, its stream, and its tick in that stream."""

    what: str
    stream: FakeStream
    tick: int

    def __str__(self) -> str:
        return f"{self.what} on {self.stream.name}"


class Clock(dict["FakeStream", int]):
    """The last tick of each stream that is known to be finished."""

    def learn(self, other: Clock) -> None:
        for stream, tick in other.items():
            self[stream] = max(self.get(stream, 0), tick)

    def knows(self, access: Access) -> bool:
        return self.get(access.stream, 0) >= access.tick


class Event:
    """A point in a stream."""

    def __init__(self, device: FakeDevice, stream: FakeStream) -> None:
        self.device = device
        self.stream = stream
        self.clock = Clock(stream.clock)

    def query(self) -> bool:
        """Whether the device has passed the event: only if the test sets `is_fast`. Then the host knows."""
        self.device.log.append(f"query {self.stream.name}")
        if self.device.is_fast:
            self.device.host.learn(self.clock)
        return self.device.is_fast

    def synchronize(self) -> None:
        """Make the host wait."""
        self.device.log.append(f"the host waits for {self.stream.name}")
        self.device.host_waits.append(self.stream.name)
        self.device.host.learn(self.clock)


class FakeStream:
    """An ordered sequence of operations."""

    def __init__(self, device: FakeDevice, name: str, priority: int = 0) -> None:
        self.device = device
        self.name = name
        self.priority = priority
        self.clock = Clock({self: 0})

    def tick(self, what: str) -> Access:
        """Add an operation."""
        self.clock.learn(self.device.host)
        self.clock[self] += 1
        return Access(what, self, self.clock[self])

    def record_event(self) -> Event:
        self.device.reap()
        self.device.log.append(f"record {self.name}")
        return Event(self.device, self)

    def wait_event(self, event: Event) -> None:
        self.device.reap()
        self.device.log.append(f"{self.name} waits for {event.stream.name}")
        self.clock.learn(event.clock)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(Event(self.device, stream))

    def synchronize(self) -> None:
        Event(self.device, self).synchronize()


@dataclass
class AsyncWork:
    """The work that the backend returns for a collective on its own stream."""

    event: Event
    really: Any = None  # the work of a backend that moves data

    def wait(self) -> None:
        if self.really is not None:
            self.really.wait()
        self.event.device.current_stream().wait_event(self.event)

    def is_completed(self) -> bool:
        return self.really is None or bool(self.really.is_completed())


@dataclass
class Memory:
    """One storage: the stream that owns its memory, and all accesses since its allocation."""

    owner: FakeStream
    write: Access | None = None
    reads: dict[FakeStream, Access] = field(default_factory=dict)

    @property
    def accesses(self) -> list[Access]:
        return [*self.reads.values(), *([self.write] if self.write else [])]


# Operations on process groups do not declare their writes: the first argument, or nothing.
_WRITTEN = {"_allgather_base_", "_reduce_scatter_base_", "allreduce_", "broadcast_", "alltoall_base_", "recv_"}
_WRITTEN |= {"allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"}  # these write a whole list
_NOT_WRITTEN = {"send"}
_ALLOCATING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
# Views that are not declared as such, metadata.
_NOT_TOUCHING = _ALLOCATING | {"set_", "resize_", "unsafe_split_with_sizes", "_has_compatible_shallow_copy_type"}


class FakeDevice(TorchDispatchMode):
    """The module (``Stream``, ``current_stream``, ``stream``, ``current_device``) and the check of all operations.

    On an accelerator, the host accesses its own memory; tests mark such accesses with `by_host`.

    Attributes:
        races: a sentence for each access that could happen too early.
        log: records, waits, allocations and releases, in the order of issue.
        host_waits: the events that the host waited for.
        is_fast: whether the device counts as having passed every event that the host queries.
    """

    def __init__(self, *, is_fast: bool = False) -> None:
        super().__init__()
        self.is_fast = is_fast
        self.races: list[str] = []
        self.log: list[str] = []
        self.host_waits: list[str] = []
        self.host = Clock()
        self._naming = "another"  # the name of the stream that is being made
        self._compute = FakeStream(self, "compute")
        self._backend = FakeStream(self, "the backend")
        self._current = [self._compute]
        self._memory: dict[weakref.ref[torch.UntypedStorage], Memory] = {}
        self._dead: list[Memory] = []
        self._stack = ExitStack()

    # -- the interface of torch.cuda -----------------------------------------------------------------------------------

    def Stream(self, device: Any = None, *, priority: int = 0) -> FakeStream:
        return FakeStream(self, self._naming, priority)

    def current_stream(self, device: Any = None) -> FakeStream:
        return self._current[-1]

    def current_device(self) -> int:
        return 0

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    @contextmanager
    def by_host(self) -> Iterator[None]:
        """Operations inside run on the host, immediately; it only knows the ticks that it has waited for."""
        host = FakeStream(self, "the host")
        with self.stream(host):
            yield
        self.host.learn(host.clock)

    # -- the check ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> FakeDevice:
        super().__enter__()
        self._stack.enter_context(seam.standing_in(self))
        self._stack.enter_context(patch.object(seam.Device, "new_stream", self._named(seam.Device.new_stream)))
        self._stack.enter_context(patch.object(FlatBuffer, "allocate", self._noted(FlatBuffer.allocate, "allocate")))
        self._stack.enter_context(patch.object(FlatBuffer, "free", self._noted(FlatBuffer.free, "free")))
        self._stack.enter_context(patch.object(torch.UntypedStorage, "resize_", self._resized()))
        for issuing in (process_group_transport, staged):
            self._stack.enter_context(patch.object(issuing, "PendingWork", self._pending_work))
        for name in ("all_to_all_single", "all_reduce"):
            self._stack.enter_context(patch.object(dist, name, self._collective(getattr(dist, name))))
        return self

    def __exit__(self, *exception: Any) -> None:
        self.reap()
        issued.clear()  # of events that nothing will pass
        self._stack.close()
        super().__exit__(*exception)

    def _named(self, new_stream: Callable[..., seam.Stream]) -> Callable[..., seam.Stream]:
        def named(device: seam.Device, name: str, **options: Any) -> seam.Stream:
            self._naming = name
            try:
                return new_stream(device, name, **options)
            finally:
                self._naming = "another"

        return named

    def _noted(self, method: Callable[[FlatBuffer], None], what: str) -> Callable[[FlatBuffer], None]:
        def noted(buffer: FlatBuffer) -> None:
            before = buffer.allocated
            storage = buffer.tensor.untyped_storage()
            if what == "free" and before:
                self._freed(self._memory.pop(weakref.ref(storage), None), f"{buffer._category} buffer")
            method(buffer)
            if buffer.allocated is not before:
                self.log.append(f"{what} {buffer._category} on {self.current_stream().name}")
                if what == "allocate":
                    self._owned_by_current(buffer.tensor)

        return noted

    def _resized(self) -> Callable[[torch.UntypedStorage, int], Any]:
        """`UntypedStorage.resize_`, by which memory is allocated and freed while tensors stay."""
        resize: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            reference = weakref.ref(storage, self._died)
            before = storage.nbytes()
            if not size and before:
                self._freed(self._memory.pop(reference, None), "tensor's memory")
            result = resize(storage, size)
            if size and not before:
                self._memory[reference] = Memory(self.current_stream())
            return result

        return resized

    def _pending_work(self, *, work: Any = None, **others: Any) -> seam.PendingWork:
        return self._pending(work) if isinstance(work, dist.Work) else seam.PendingWork(work=work, **others)

    def _pending(self, work: Any) -> seam.PendingWork:
        return seam.PendingWork(work=None if work is None else AsyncWork(Event(self, self._backend), work))

    def _collective(self, issue: Callable[..., Any]) -> Callable[..., Any]:
        """A function of torch.distributed whose work, if it returns one, orders streams when it is waited for."""

        def collective(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            work = issue(*args, async_op=async_op, **kwargs)
            return AsyncWork(Event(self, self._backend), work) if async_op else work

        return collective

    def _owned_by_current(self, tensor: Tensor) -> Memory:
        reference = weakref.ref(tensor.untyped_storage(), self._died)
        memory = self._memory[reference] = Memory(self.current_stream())
        return memory

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        memory = self._memory.pop(reference, None)
        if memory is not None:
            self._dead.append(memory)

    def reap(self) -> None:
        """Check the storages that were freed since the last operation."""
        while self._dead:
            self._freed(self._dead.pop(), "tensor")

    def _freed(self, memory: Memory | None, what: str) -> None:
        for access in memory.accesses if memory is not None else ():
            assert memory is not None
            if not (memory.owner.clock.knows(access) or self.host.knows(access)):
                self._race(f"a {what} goes back to {memory.owner.name} before {access} is over")

    def _race(self, words: str) -> None:
        if words not in self.races:
            self.races.append(words)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reap()
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        known = {weakref.ref(tensor.untyped_storage()) for tensor in _tensors([*args, *kwargs.values()])}
        stream = self.current_stream()
        if _is_asynchronous(func, args):
            self._backend.clock.learn(stream.clock)
            stream = self._backend
        access = stream.tick(name)
        if name == "_local_scalar_dense":
            self.host.learn(self.current_stream().clock)
            self.host_waits.append(f"a value of {self.current_stream().name}")
        if not (func.is_view or name in _NOT_TOUCHING):
            written = _written(func, name, args, kwargs)
            for tensor in _tensors([*args, *kwargs.values()]):
                if not any(tensor is other for other in written):
                    self._read(tensor, access)
            for tensor in written:
                self._write(tensor, access)
        result = func(*args, **kwargs)
        for tensor in _tensors([result]) if name != "set_" else ():  # whose memory has its owner already
            if weakref.ref(tensor.untyped_storage()) not in known and not func.is_view:
                memory = self._owned_by_current(tensor)
                memory.write = None if name in _NOT_TOUCHING else access
        return result

    def _at(self, tensor: Tensor) -> Memory:
        return self._memory.get(weakref.ref(tensor.untyped_storage())) or self._owned_by_current(tensor)

    def _read(self, tensor: Tensor, access: Access) -> None:
        memory = self._at(tensor)
        if memory.write is not None and not access.stream.clock.knows(memory.write):
            self._race(f"{access} may read before {memory.write} has written")
        memory.reads[access.stream] = access

    def _write(self, tensor: Tensor, access: Access) -> None:
        memory = self._at(tensor)
        for earlier in memory.accesses:
            if not access.stream.clock.knows(earlier):
                self._race(f"{access} may write before {earlier} is over")
        memory.write, memory.reads = access, {}


def _tensors(values: Any) -> list[Tensor]:
    """The tensors with memory; for one that is made of others, such as a DTensor, its parts."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if hasattr(type(value), "__tensor_flatten__"):
                found += _tensors([getattr(value, name) for name in value.__tensor_flatten__()[0]])
            elif value.numel():
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _written(func: Any, name: str, args: Any, kwargs: Any) -> list[Tensor]:
    if func.namespace == "c10d":
        assert name in _WRITTEN | _NOT_WRITTEN, f"say whether {name} writes its first argument"
        return _tensors([args[0]]) if name in _WRITTEN else []
    declared = func._schema.arguments
    positional = [value for value, argument in zip(args, declared, strict=False) if _is_written(argument)]
    return _tensors([*positional, *(kwargs[a.name] for a in declared if _is_written(a) and a.name in kwargs)])


def _is_asynchronous(func: Any, args: Any) -> bool:
    for place, argument in enumerate(func._schema.arguments if func.namespace == "c10d" else ()):
        if argument.name in ("async_op", "asyncOp"):
            return bool(args[place] if place < len(args) else argument.default_value)  # defaults are not passed
    return False


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


@contextmanager
def streams(**options: Any) -> Iterator[FakeDevice]:
    """A fake device, with a check for races at the end."""
    with FakeDevice(**options) as device:
        yield device
    assert not device.races, "\n".join(device.races)
