"""The end of a run before its time.

[Note: stopping] A signal, or a callback, asks one rank to stop. It goes on with its step; the request travels with the
loss, so that all ranks know of it after the same step, and stop there, with a checkpoint. A second signal of the same
kind is not asked to wait: it does what it did before the run. One that comes `ECHO_SECONDS` after the first at most is
the same one on another way: who ends a job (Slurm, systemd, `timeout`) tells all its processes, and what started the
ranks tells them, too.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # the last: what Slurm sends some time before the end
ECHO_SECONDS = 3.0
ASKED = 1  # a request's number where the program asked; otherwise the signal's


class StopRequest:
    """Whether this rank was asked to stop.

    Attributes:
        number: 0 for no, `ASKED`, or the number of the signal.
    """

    def __init__(self) -> None:
        self.number = 0

    def ask(self) -> None:
        """Ask from within the program; a signal that came goes first."""
        self.number = self.number or ASKED

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A context in which signals are requests. In other threads than the main one signals stay what they are."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) is not signal.SIG_IGN}

        came: dict[int, float] = {}

        def note(number: int, frame: FrameType | None) -> None:
            self.number = number
            if is_first(number, came):
                return
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def is_first(number: int, came: dict[int, float]) -> bool:
    """Whether a signal is the first of its kind, or one with it; `came` notes when the first came."""
    now = time.monotonic()
    return now - came.setdefault(number, now) < ECHO_SECONDS


def in_words(number: int) -> str:
    """What a request's number says: "SIGTERM", or "the program"."""
    return "the program" if number == ASKED else signal.Signals(number).name
