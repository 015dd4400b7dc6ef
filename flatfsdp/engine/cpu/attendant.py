"""The thread that advances exchanges while this rank does not wait for any.

[Note: attendant] A rank advances its exchanges while it waits ([Note: progress]). A rank that does not reach a wait
(its batch is larger, it caught an exception, it writes a file) would hold up the collectives that it has issued; with
gloo, threads would complete them. So this thread advances exchanges that have had no progress for `PERIOD`. Usually
there are none, and each check takes time of a processor from the computation: so the interval doubles, up to `SLOWEST`
periods, until there is something to do. Exchanges without work for `REST`, or that are to rest soon, give back memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

PERIOD = 0.005  # seconds
SLOWEST = 8  # periods between two checks, at most
REST = 0.2  # seconds
LONG_AGO = float("-inf")


class Attended(Protocol):
    """The interface of exchanges that the thread advances.

    Attributes:
        worked_at: the time of the last progress, by `time.monotonic()`; `LONG_AGO` to rest as soon as possible.
    """

    worked_at: float

    @property
    def has_work(self) -> bool:
        """Whether a collective is in flight."""

    def progress(self) -> bool:
        """Advance as far as possible without waiting; returns whether there was any progress."""

    def rest(self) -> bool:
        """Give back memory that only collectives use, after a time without any. Returns False to be called again;
        True also resets `worked_at` from `LONG_AGO`."""


class Attendant:
    """The thread, which starts when it is first needed and sleeps while no collective is in flight."""

    def __init__(self, attended: Callable[[], Iterable[Attended]]) -> None:
        """`attended` returns all current exchanges; the thread keeps none of them alive."""
        self._attended = attended
        self._wanted, self._hurried = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, *, soon: bool = False) -> None:
        """Wake the thread: a collective is in flight, or (`soon`) an exchange is to rest as soon as possible."""
        if not self._wanted.is_set():
            self._wanted.set()
        if soon:
            self._hurried.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    # A daemon: the process must be able to exit if another rank has died.
                    self._thread = threading.Thread(target=self._run, name="flatfsdp exchange", daemon=True)
                    self._thread.start()

    def forget(self) -> None:
        """Reset the state in a forked child, which does not have the thread."""
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
                    if not self._is_idle():  # a collective was issued in the meantime
                        self._wanted.set()

    def _is_idle(self) -> bool:
        """Let exchanges rest that had no work for `REST`; returns whether nothing is in flight and all are at rest."""
        attended = list(self._attended())
        idle = [each for each in attended if not each.has_work]
        rest = [time.monotonic() - each.worked_at > REST and each.rest() for each in idle]
        return len(idle) == len(attended) and all(rest)

    def _work(self) -> bool:
        """Advance exchanges without progress for `PERIOD`; returns whether any advanced, or one is to rest soon."""
        attended = list(self._attended())
        moved = any(each.worked_at == LONG_AGO for each in attended)
        for each in attended:
            if each.has_work and time.monotonic() - each.worked_at > PERIOD:
                try:
                    moved |= each.progress()
                except RuntimeError:
                    each.worked_at = float("inf")  # leaves the group alone: the next wait for it raises the same error
        return moved
