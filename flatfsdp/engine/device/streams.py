"""The interface to devices: streams, and work in flight as a value.

[Note: streams] A `Stream` is an order of execution concurrent to compute. On an accelerator it is a stream; on a CPU
the host's own order takes its place, while collectives run in the backend's threads. Both have the same order of
*issue*. They differ in when memory may be reused: a wait on a CPU blocks the host, a wait on an accelerator only orders
streams. Hence two rules for both: the object that represents a work keeps its tensors alive until it was waited for
(`PendingWork`), and a buffer is freed on the stream that allocated it, after an event of the stream that used it last.
`record_stream` is never called.

On an accelerator, too, a `Stream` may be the caller's own: its collectives still overlap with compute, on streams of
the backend, but memory is allocated and freed in order with compute, and needs no events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Protocol

import torch

from ..base.overrides import Override, is_memoryless, without_memory
from ..base.wait_limits import blocking, issued


class Work(Protocol):
    """An operation that is not finished yet: of a communication backend, or the reduction of gradients."""

    def wait(self) -> Any: ...


_stand_in: Override[Any] = Override(None)
# A context in which a module (with streams and events like those of `torch.cuda`) orders the work of CPU tensors, in
# models that are wrapped inside: a test double.
standing_in = _stand_in.being


class Device:
    """One compute device and the operations on its streams.

    Attributes:
        module: streams, events and the allocator, as in `torch.cuda`; None on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.module: ModuleType | Any | None = _stand_in.value
        if device.type not in ("cpu", "meta"):
            self.module = torch.get_device_module(device)
            if device.index is None:
                device = torch.device(device.type, self.module.current_device())
        self.device = device

    @property
    def has_streams(self) -> bool:
        """Whether work is ordered by streams (on an accelerator) instead of by the host."""
        return self.module is not None

    def new_stream(self, name: str, *, high_priority: bool = False) -> Stream:
        """A new stream that is concurrent to compute."""
        if self.module is None:
            return Stream(name, self, None)
        return Stream(name, self, self.module.Stream(self.device, priority=-1 if high_priority else 0))

    def current_stream(self) -> Any:
        """The stream on which the caller computes (None on CPU)."""
        return self.module.current_stream(self.device) if self.module is not None else None

    def running_on(self, stream: Any) -> AbstractContextManager[None]:
        """A context in which `stream` is the current one."""
        assert self.module is not None
        return self.module.stream(stream)

    def mark(self) -> Any:
        """An event at the current end of the caller's stream (None on CPU)."""
        return self.current_stream().record_event() if self.module is not None else None

    def await_mark(self, event: Any) -> None:
        """Order the caller's stream after `event`."""
        if event is not None:
            self.current_stream().wait_event(event)

    def block_host(self, event: Any) -> None:
        """Block the host until the device has reached `event`."""
        if event is not None:
            event.synchronize()

    def is_past(self, event: Any) -> bool:
        """Whether the device has reached `event` (always, on CPU)."""
        return event is None or event.query()


_HERE: AbstractContextManager[None] = nullcontext()


class Stream:
    """An order of execution: a stream of an accelerator; without one the caller's own order, on a CPU the host's.

    Attributes:
        is_stream: whether it is a stream of its own.
        is_callers: whether it is the caller's own order: work issued here is in order with the caller's computation.
    """

    def __init__(self, name: str, device: Device, stream: Any) -> None:
        self.name = name
        self._device = device
        self._stream = stream
        self.is_stream = stream is not None
        self.is_callers = stream is None
        self._downloaded: Any = None  # an event after the last download that the host has not waited for

    def running(self) -> AbstractContextManager[None]:
        """A context in which work is issued on this stream."""
        return _HERE if self._stream is None else self._device.running_on(self._stream)

    def follow_compute(self) -> None:
        """Order later work of this stream after all work issued on the caller's stream so far."""
        if self._stream is not None:
            self._stream.wait_stream(self._device.current_stream())

    def mark(self) -> Any:
        """An event at the current end of this stream (None on CPU)."""
        return self._stream.record_event() if self._stream is not None else self._device.mark()

    def await_mark(self, event: Any) -> None:
        """Order later work of this stream after `event`."""
        if self._stream is None:
            self._device.await_mark(event)
        elif event is not None:
            self._stream.wait_event(event)

    def pending(self, *keep: torch.Tensor) -> PendingWork:
        """The work that was issued on this stream so far, which uses the tensors `keep`."""
        return PendingWork(device=self._device, event=self.mark(), keep=keep)

    def communicating(self, *keep: torch.Tensor) -> PendingWork:
        """`pending` after a collective on this stream, which the watch asks about. [Note: waits]"""
        event = self.mark()
        if event is not None and not is_memoryless():  # a dry run's events are never passed
            issued[self.name] = event, time.monotonic()
        return PendingWork(device=self._device, event=event, keep=keep)

    def download(self, tensor: torch.Tensor) -> tuple[torch.Tensor, PendingWork]:
        """Start to copy `tensor` into page-locked host memory on this stream, on an accelerator.

        Returns the copy, which the host may read after `await_downloads`, and the work, which keeps `tensor` alive.
        """
        copy = pinned_like(tensor)
        with self.running():
            copy.copy_(tensor, non_blocking=True)
        self._downloaded = self.mark()
        return copy, PendingWork(device=self._device, event=self._downloaded, keep=(tensor, copy))

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> PendingWork:
        """Start to fill `target` with `source`, host memory, on this stream."""
        with self.running():
            target.copy_(source, non_blocking=True)
        return self.pending(target, source)

    def await_downloads(self) -> None:
        """Block the host until all downloads are complete."""
        event, self._downloaded = self._downloaded, None
        self._device.block_host(event)


class PendingWork:
    """Work in flight: keeps every tensor that it reads or writes alive until it was waited for.

    `wait()` orders the caller after the work (on a CPU it blocks), runs `finish` once, and releases the tensors. More
    calls do nothing.

    Attributes:
        done: whether it was waited for.
        advances_in_waits: whether it makes progress only while ranks wait, not while they compute.
    """

    __slots__ = ("_device", "_event", "_finish", "_keep", "_work", "advances_in_waits", "done")

    def __init__(
        self,
        *,
        work: Work | None = None,
        device: Device | None = None,
        event: Any = None,
        keep: tuple[torch.Tensor, ...] = (),
        finish: Callable[[], None] | None = None,
        advances_in_waits: bool = False,
    ) -> None:
        self._work = work
        self._device = device
        self._event = event
        self._keep = keep
        self._finish = finish
        self.advances_in_waits = advances_in_waits
        self.done = False

    def followed_by(self, finish: Callable[[], None], *keep: torch.Tensor) -> PendingWork:
        """Run `finish`, which uses the tensors `keep`, in the wait for this work. Use the returned work instead."""
        if self.done or self._finish is not None:
            return PendingWork(work=self, keep=keep, finish=finish)
        self._finish, self._keep = finish, (*self._keep, *keep)
        return self

    def wait(self) -> None:
        """Order the caller after the work, which requires that the peers have issued theirs."""
        if self.done:
            return
        if self._work is not None:
            blocking[self] = time.monotonic()
            try:
                self._work.wait()
            finally:
                del blocking[self]
        if self._device is not None:
            self._device.await_mark(self._event)
        if self._finish is not None:
            self._finish()
        self.done = True
        self._work = self._event = self._finish = None
        self._keep = ()


DONE = PendingWork()
DONE.wait()


def accelerator_count() -> int:
    """The number of accelerators of this machine."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def accelerator(index: int | None = None) -> torch.device | None:
    """The accelerator of that index, by default the current one; None on a machine that has none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index() if index is None else index)


def in_host_memory(there: bool = True) -> AbstractContextManager[None]:
    """A context in which new tensors on the CPU are in host memory, if `there`: in a dry run the accelerator's show the
    CPU, too."""
    simulated = getattr(without_memory.value, "device", None)
    return simulated.in_host_memory() if there and simulated is not None else _HERE


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in page-locked host memory, so that copies from it can overlap; itself if there is no accelerator."""
    if torch.accelerator.is_available() and not is_memoryless():
        return tensor.pin_memory()
    return tensor


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialized host memory for a copy of `tensor`, page-locked if there is an accelerator."""
    locked = torch.accelerator.is_available() and not is_memoryless()
    with in_host_memory():
        return torch.empty_like(tensor, device="cpu", pin_memory=locked)
