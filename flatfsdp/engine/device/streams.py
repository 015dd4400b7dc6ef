"""The one device seam: streams, and in-flight work as a value.

[Note: streams] A `Stream` is an order of execution beside compute. On an accelerator it is one; on CPU there is none
and the host itself is the order, while collectives run in the backend's threads. Both share one order of *issue*. What
differs is when memory may be reused: a CPU wait blocks the host, an accelerator's wait only orders streams. Hence two
rules that hold for both: whoever starts work keeps its tensors alive until it was waited for (`PendingWork`), and a
buffer is freed on the stream that allocated it, after an event of the stream that used it last. `record_stream` is
never called.

A `Stream` may be the caller's own order on an accelerator, too: its collectives still run beside compute, on streams of
the backend's, but memory is taken and given back in order with compute, and needs no events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Protocol

import torch

from ..base.overrides import Override
from ..base.wait_limits import blocking
from .fake_tensors import is_memoryless


class Work(Protocol):
    """What a communication backend hands back for an asynchronous operation."""

    def wait(self) -> Any: ...


_stand_in: Override[Any] = Override(None)
# Inside, a module (with the streams and events of `torch.cuda`) orders the work of CPU tensors in models that are
# wrapped there: a double for tests.
standing_in = _stand_in.being


class Device:
    """One compute device and the operations on its streams."""

    def __init__(self, device: torch.device) -> None:
        self._module: ModuleType | Any | None = _stand_in.value
        if device.type not in ("cpu", "meta"):
            self._module = torch.get_device_module(device)
            if device.index is None:
                device = torch.device(device.type, self._module.current_device())
        self.device = device

    @property
    def has_streams(self) -> bool:
        """Whether work is ordered by streams (an accelerator) and not by the host."""
        return self._module is not None

    def new_stream(self, name: str, *, high_priority: bool = False) -> Stream:
        """A new stream beside compute."""
        if self._module is None:
            return Stream(name, self, None)
        return Stream(name, self, self._module.Stream(self.device, priority=-1 if high_priority else 0))

    def current_stream(self) -> Any:
        """The stream on which the caller computes (None on CPU)."""
        return self._module.current_stream(self.device) if self._module is not None else None

    def running_on(self, stream: Any) -> AbstractContextManager[None]:
        """Makes `stream` the current one."""
        assert self._module is not None
        return self._module.stream(stream)

    def mark(self) -> Any:
        """An event at the current end of the caller's stream (None on CPU)."""
        return self.current_stream().record_event() if self._module is not None else None

    def await_mark(self, event: Any) -> None:
        """Order the caller's stream after `event`."""
        if event is not None:
            self.current_stream().wait_event(event)

    def block_host(self, event: Any) -> None:
        """Keep the host until the device has reached `event`."""
        if event is not None:
            event.synchronize()

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start to copy `tensor`, which lives here or on the host, in the caller's order; the copy, and the event that
        the device has to be past before the host reads it."""
        if self._module is None or tensor.device.type == "cpu":
            return tensor, None
        copy = pinned_like(tensor)
        copy.copy_(tensor, non_blocking=True)
        return copy, self.mark()

    def is_past(self, event: Any) -> bool:
        """Whether the device has reached `event` (always, on CPU)."""
        return event is None or event.query()


_HERE: AbstractContextManager[None] = nullcontext()


class Stream:
    """An order of execution: a stream on an accelerator; without one the caller's own, which on CPU is the host's.

    Attributes:
        is_stream: whether it is an order of its own, beside the host.
        is_callers: whether it is the caller's own order: what is issued here is in order with what the caller computes.
    """

    def __init__(self, name: str, device: Device, stream: Any) -> None:
        self.name = name
        self._device = device
        self._stream = stream
        self.is_stream = stream is not None
        self.is_callers = stream is None
        self._downloaded: Any = None  # an event behind the last download that the host has not waited for

    def running(self) -> AbstractContextManager[None]:
        """Issue the enclosed work on this stream."""
        return _HERE if self._stream is None else self._device.running_on(self._stream)

    def follow_compute(self) -> None:
        """Order what this stream runs next after everything that the caller's stream was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(self._device.current_stream())

    def mark(self) -> Any:
        """An event at the current end of this stream (None on CPU)."""
        return self._stream.record_event() if self._stream is not None else self._device.mark()

    def await_mark(self, event: Any) -> None:
        """Order what this stream runs next after `event`."""
        if self._stream is None:
            self._device.await_mark(event)
        elif event is not None:
            self._stream.wait_event(event)

    def download(self, tensor: torch.Tensor) -> tuple[torch.Tensor, PendingWork]:
        """Start to copy `tensor` into page-locked host memory on this stream, on an accelerator.

        Returns the copy, which the host may read after `await_downloads`, and what keeps `tensor` until then.
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
        return PendingWork(device=self._device, event=self.mark(), keep=(target, source))

    def await_downloads(self) -> None:
        """Keep the host until all that was downloaded is there."""
        event, self._downloaded = self._downloaded, None
        self._device.block_host(event)


class PendingWork:
    """In-flight work: owns every tensor that it reads or writes until it was waited for.

    `wait()` orders the caller after the work (blocking on CPU), runs `finish` once, and lets the tensors go. It may be
    called again at no cost.

    Attributes:
        done: whether it was waited for.
        advances_in_waits: whether it goes on only where ranks wait, and not beside what they compute.
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
        """This work and, when it is waited for, `finish`, which uses the tensors `keep`. In its place from now on."""
        if self.done or self._finish is not None:
            return PendingWork(work=self, keep=keep, finish=finish)
        self._finish, self._keep = finish, (*self._keep, *keep)
        return self

    def wait(self) -> None:
        """Order the caller after the work; collective only in the sense that the peers must have issued theirs."""
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
    """How many accelerators this machine has."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def accelerator(index: int | None = None) -> torch.device | None:
    """The accelerator of that index, the current one without; None on a machine that has none."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return None
    return torch.device(kind.type, torch.accelerator.current_device_index() if index is None else index)


def concrete(device: torch.device) -> torch.device:
    """`device` as tensors have it: a CPU has no index, an accelerator without one is the current one."""
    if device.type == "cpu":
        return torch.device("cpu")
    current = accelerator() if device.index is None else None
    return current if current is not None and current.type == device.type else device


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in page-locked host memory where an accelerator is present, else itself: copies from it overlap."""
    if torch.accelerator.is_available() and not is_memoryless():
        return tensor.pin_memory()
    return tensor


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for a copy of `tensor`, page-locked where an accelerator is present; undefined values."""
    locked = torch.accelerator.is_available() and not is_memoryless()
    return torch.empty_like(tensor, device="cpu", pin_memory=locked)
