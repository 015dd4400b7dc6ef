"""Where this process waits for other ranks, and for how long it may.

[Note: waits] Whatever blocks the host until other ranks have done their part is entered here for as long as it lasts:
`blocked()` around an operation of the backend, or an entry in `blocking` by hand where units pass many times a step.
The watch ([Note: watch]) reads it from its thread, and distinguishes a rank that waits from one that computes, or whose
program is somewhere else.

On an accelerator the host does not wait for operations: it is held up by the limiter some units later, which counts, or
by the program's own reading of a value, which does not.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...errors import ConfigValueError, refuse_type, refuse_value


@dataclass(frozen=True)
class WaitLimits:
    """How long this rank waits in one place.

    Attributes:
        report_after: seconds until all ranks print what each of them does.
        raise_after: seconds until it is an error on all ranks; None for never.
    """

    report_after: float = 30.0
    raise_after: float | None = None


limits = WaitLimits()


def set_collective_timeout(*, report_after: float = 30.0, raise_after: float | None = None) -> None:
    """Choose how long this process waits for other ranks, in one place, before something is done about it.

    After `report_after` every rank prints one report to standard error: what each rank does, waits in, and since when.
    A rank that is late because of its data leads to that report and to nothing else; a line reports when this rank goes
    on. After `raise_after` it is a `WaitError` on every rank. A rank blocked in a collective at that moment cannot be
    interrupted: it prints the error and ends its process a few seconds later.

    Each rank keeps its own time, so call it on every rank, before or between steps. Not collective.

    Args:
        report_after: seconds, more than 0; `math.inf` for no report.
        raise_after: seconds, not less than `report_after`; None to wait for as long as it takes.

    Raises:
        ConfigTypeError: no number.
        ConfigValueError: a number that is out of range.

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
            refuse_value(name, value, "a number of seconds, more than 0")
    if raise_after is not None and raise_after < report_after:
        raise ConfigValueError(
            f"raise_after: got {raise_after!r} with report_after={report_after!r}. Accepted: a number of seconds that "
            "is not less than report_after, whose report shows what went wrong"
        )
    limits = WaitLimits(float(report_after), None if raise_after is None else float(raise_after))


blocking: dict[object, float] = {}  # by what blocks a thread: since when it does, by `time.monotonic()`


class _ForeignWait:
    """Stands in `blocking` for an operation of the program's own, over a process group that only it knows, and in any
    thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()


@contextmanager
def blocked(*, theirs: bool = False) -> Iterator[None]:
    """The enclosed code blocks this thread until other ranks have done their part.

    `theirs`: in an operation of the program's own, whose process group may have any time limit.
    """
    this = _ForeignWait() if theirs else object()
    blocking[this] = time.monotonic()
    try:
        yield
    finally:
        del blocking[this]


def blocked_since(*, by_ours: bool = False) -> float:
    """Since when a thread of this process has been blocked, by `time.monotonic()`; infinity where none is.

    `by_ours`: not by the program's own operations.
    """
    since = [began for what, began in list(blocking.items()) if not (by_ours and isinstance(what, _ForeignWait))]
    return min(since, default=math.inf)


def standing() -> tuple[float, ...]:
    """What keeps the main thread from going on, by since when each does; empty where nothing need."""
    main = threading.main_thread().ident
    found = list(blocking.items())
    return tuple(sorted(began for what, began in found if not isinstance(what, _ForeignWait) or what.thread == main))
