"""The thread that goes on with exchanges while this rank computes for long, or does something else.

[Note: attendant] A rank works on its exchanges where it waits ([Note: progress]). One that does not come to a wait (its
batch is larger, it caught an exception, it writes a file) would keep its peers from what it has issued, which gloo's
threads would have brought to its end. So what nobody has worked on for `PERIOD` is worked on here. In a usual step that
is nothing: the thread looks, and sleeps again. What has had no work for `REST`, or is to rest soon, it brings to rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

PERIOD = 0.005  # seconds
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
        """Do what can be done now."""

    def rest(self) -> bool:
        """There was nothing under way for long: let go of what is for work alone. False to be called again; if not,
        nothing is to rest soon any more."""


class Attendant:
    """The thread, which begins when it is first needed and sleeps while nothing is under way."""

    def __init__(self, attended: Callable[[], Iterable[Attended]]) -> None:
        """`attended`: all that there is now; the thread keeps none of it alive."""
        self._attended = attended
        self._wanted = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Something is under way."""
        if not self._wanted.is_set():
            self._wanted.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    # A daemon: where another rank is gone the process must be able to end.
                    self._thread = threading.Thread(target=self._run, name="flatfsdp exchange", daemon=True)
                    self._thread.start()

    def forget(self) -> None:
        """In a child that was forked, which has no such thread."""
        self._wanted, self._lock, self._thread = threading.Event(), threading.Lock(), None

    def _run(self) -> None:
        are_at_rest = False
        while True:
            is_wanted = self._wanted.wait(None if are_at_rest else REST)
            are_at_rest = self._rest() and not is_wanted
            if not is_wanted:
                continue
            time.sleep(PERIOD)
            if not self._work():
                self._wanted.clear()
                if self._work():  # issued since
                    self._wanted.set()

    def _rest(self) -> bool:
        """Bring to rest what was left alone for long; whether nothing is left to do."""
        idle = [each for each in self._attended() if not each.has_work]
        return all([time.monotonic() - each.worked_at > REST and each.rest() for each in idle])

    def _work(self) -> bool:
        """Work on what was left alone; whether anything is under way, or to rest soon."""
        attended = list(self._attended())
        under_way = [each for each in attended if each.has_work]
        for each in under_way:
            if time.monotonic() - each.worked_at > PERIOD:
                try:
                    each.progress()
                except RuntimeError:
                    each.worked_at = float("inf")  # who waits for it meets this, too
        return bool(under_way) or any(each.worked_at == LONG_AGO for each in attended)
