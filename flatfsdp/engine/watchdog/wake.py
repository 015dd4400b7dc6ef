"""Wakes a thread, also from finalizers.

[Note: finalizers] The garbage collector may run a finalizer between any two instructions of any thread, also inside of
the methods of a `threading.Event`, which hold a lock: a finalizer that sets the same event waits for that lock forever.
"""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue


class Wake:
    """Like an event that clears itself when it ends a wait."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[None] = SimpleQueue()  # whose `put` may interrupt all of its methods

    def set(self) -> None:
        """End the running wait, or the next one."""
        if self._requests.empty():
            self._requests.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until `set` is called, at most so many seconds."""
        with suppress(Empty):
            self._requests.get(timeout=seconds)
