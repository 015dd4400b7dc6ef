"""The waits of this process for other ranks, and their time limits.

[Note: waits] Every operation that blocks the host until other ranks have done their part is recorded here while it
lasts: by `blocked()` around an operation of the backend, or by an entry in `blocking` on paths that run many times per
step. The watch ([Note: watch]) reads these records from its thread, to distinguish a rank that waits from one that
computes, or whose program is in other code.

On an accelerator the host does not wait for operations: the program blocks it, when it reads a value. So the newest
collective of each stream is recorded in `issued`, with the event after it: one that the device does not pass for
seconds counts as a wait since the collective was issued. The event is asked by the watch's thread, and only then.

Waits count if they keep the program: those of the main thread, and of every thread that runs a backward. Autograd runs
the hooks of a backward on an accelerator in threads of its own, for which the thread that called it waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigValueError, refuse_type, refuse_value
from . import _torch


@dataclass(frozen=True)
class WaitLimits:
    """The time limits of a wait in one place.

    Attributes:
        report_after: seconds until all ranks print the status of every rank.
        raise_after: seconds until it is an error on all ranks; None for never.
    """

    report_after: float = 30.0
    raise_after: float | None = None


limits = WaitLimits()


def set_collective_timeout(*, report_after: float = 30.0, raise_after: float | None = None) -> None:
    """Set how long this process waits for other ranks, in one place, before that is reported or becomes an error.

    After `report_after` every rank prints one report to standard error: the activity of each rank, and its duration. A
    rank that is late because of its data has no other consequence, and a line reports when this rank continues. After
    `raise_after` every rank raises a `WaitError`. A rank that is blocked in a collective at that time cannot be
    interrupted: it prints the error and ends its process a few seconds later.

    The limits apply to this rank only, so call it on every rank, before or between steps. Not collective.

    Args:
        report_after: seconds, more than 0; `math.inf` for no report.
        raise_after: seconds, not less than `report_after`; None to wait for as long as it takes.

    Raises:
        ConfigTypeError: an argument is not a number.
        ConfigValueError: a number is out of range.

    Example:
        >>> import flatfsdp
        >>> flatfsdp.set_collective_timeout(report_after=60, raise_after=600)
        >>> flatfsdp.set_collective_timeout()  # back to the defaults
    """
    global limits
    for name, value in (("report_after", report_after), ("raise_after", raise_after)):
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None) if name == "raise_after" else int)):
            refuse_type(name, value, "a number of seconds")
        if value is not None and not value > 0:
            refuse_value(name, value, "a number of seconds greater than 0")
    if raise_after is not None and raise_after < report_after:
        raise ConfigValueError(
            f"raise_after: got {raise_after!r} with report_after={report_after!r}. Accepted: a number of seconds not "
            "less than report_after, so that a report shows what went wrong before the error"
        )
    limits = WaitLimits(float(report_after), None if raise_after is None else float(raise_after))


blocking: dict[object, float] = {}  # the beginning of each blocking operation, by `time.monotonic()`
# By the name of a stream: the event after its newest collective, and when that was issued, by `time.monotonic()`.
issued: dict[str, tuple[Any, float]] = {}
UNASKED = 5.0  # seconds in which no event is asked


def keeps_program() -> bool:
    """Whether a wait of the current thread keeps the program: it is the main thread, or runs a backward."""
    return threading.current_thread() is threading.main_thread() or _torch.graph_task() != -1


def unfinished_since() -> float:
    """When the oldest collective was issued that a device should have passed by now; infinity if there is none."""
    since, latest = math.inf, time.monotonic() - min(UNASKED, limits.report_after)
    for stream, found in list(issued.items()):
        event, began = found
        if began <= latest:
            try:
                passed = event.query()
            except RuntimeError:  # of an operation that failed: the program gets the same error
                passed = True
            if not passed:
                since = min(since, began)
            elif issued.get(stream) is found:
                del issued[stream]
    return since


class _ForeignWait:
    """A key in `blocking` for an operation of the program's own, over a process group unknown to the engine, in any
    thread."""

    def __init__(self) -> None:
        self.keeps_program = keeps_program()


@contextmanager
def blocked(*, theirs: bool = False) -> Iterator[None]:
    """A context for code that blocks this thread until other ranks have done their part.

    `theirs`: by an operation of the program's own, whose process group may have any time limit.
    """
    this = _ForeignWait() if theirs else object()
    blocking[this] = time.monotonic()
    try:
        yield
    finally:
        del blocking[this]


def blocked_since(*, by_ours: bool = False) -> float:
    """The time from which on a thread of this process is blocked, or the device, by `time.monotonic()`; infinity if
    none is.

    `by_ours`: ignores the program's own operations.
    """
    since = [began for what, began in list(blocking.items()) if not (by_ours and isinstance(what, _ForeignWait))]
    return min([*since, unfinished_since()] if issued else since, default=math.inf)


def standing() -> tuple[float, ...]:
    """The beginnings of all waits that may keep the program, sorted; empty if there is none."""
    found = list(blocking.items())
    return tuple(sorted(began for what, began in found if not isinstance(what, _ForeignWait) or what.keeps_program))
