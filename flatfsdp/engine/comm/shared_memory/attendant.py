"""The thread that goes on with exchanges while this rank computes for long, or does something else.

[Note: attendant] A rank works on its exchanges where it waits ([Note: progress]). One that does not come to a wait (its
batch is larger, it caught an exception, it writes a file) would keep its peers from what it has issued, which gloo's
threads would have brought to its end. So what nobody has worked on for `PERIOD` is worked on here. In a usual step that
is nothing, and each look takes a processor from who computes: so the thread looks again after twice as long, up to
`SLOWEST`, until there was something to do. What has had no work for `REST`, or is to rest soon, it brings to rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

PERIOD = 0.005  # seconds
SLOWEST = 8  # periods between two looks where there was nothing to do
REST = 0.2  # seconds
LONG_AGO = float("-inf")


class Attended(Protocol):
    """What may need somebody to work on it.

    Attributes:
        worked_at: when somebody last did, by `time.monotonic()`; `LONG_AGO` where it is to rest as soon as it can.
    """

    worked_at: float

    @property
    def has_work(self) -> bool:
        """Whether something is under way."""

    def progress(self) -> bool:
        """Do what can be done now; whether there was anything."""

    def rest(self) -> bool:
        """There was nothing under way for long: let go of what is for work alone. False to be called again; if not,
        nothing is to rest soon any more."""


class Attendant:
    """The thread, which begins when it is first needed and sleeps while nothing is under way."""

    def __init__(self, attended: Callable[[], Iterable[Attended]]) -> None:
        """`attended`: all that there is now; the thread keeps none of it alive."""
        self._attended = attended
        self._wanted, self._hurried = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, *, soon: bool = False) -> None:
        """Something is under way, or (`soon`) is to rest as soon as it can."""
        if not self._wanted.is_set():
            self._wanted.set()
        if soon:
            self._hurried.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    # A daemon: where another rank is gone the process must be able to end.
                    self._thread = threading.Thread(target=self._run, name="flatfsdp exchange", daemon=True)
                    self._thread.start()

    def forget(self) -> None:
        """In a child that was forked, which has no such thread."""
        self._wanted, self._hurried = threading.Event(), threading.Event()
        self._lock, self._thread = threading.Lock(), None

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            pause = PERIOD
            while self._wanted.is_set():
                if self._hurried.wait(pause):
                    self._hurried.clear()
                    pause = PERIOD
                pause = PERIOD if self._work() else min(2 * pause, SLOWEST * PERIOD)
                if self._is_idle():
                    self._wanted.clear()
                    if not self._is_idle():  # issued since
                        self._wanted.set()

    def _is_idle(self) -> bool:
        """Bring to rest what was left alone for long; whether nothing is under way, and all rests."""
        attended = list(self._attended())
        idle = [each for each in attended if not each.has_work]
        rest = [time.monotonic() - each.worked_at > REST and each.rest() for each in idle]
        return len(idle) == len(attended) and all(rest)

    def _work(self) -> bool:
        """Work on what was left alone; whether that moved anything, or something is to rest soon."""
        attended = list(self._attended())
        moved = any(each.worked_at == LONG_AGO for each in attended)
        for each in attended:
            if each.has_work and time.monotonic() - each.worked_at > PERIOD:
                try:
                    moved |= each.progress()
                except RuntimeError:
                    each.worked_at = float("inf")  # who waits for it meets this, too
        return moved
