"""What one rank does with a model at the moment, for the watchdog thread and through it for other ranks."""

from __future__ import annotations

import math
import time

from ...errors import FlatFSDPError
from ..base.events import EventLog
from ..base.wait_limits import blocked_since
from ..comm.comm_stats import CommStats


class Activity:
    """Which part of an iteration runs.

    Attributes:
        busy: whether this rank is inside an iteration, where it may wait for others.
        doing: the part that runs, in words; None between iterations.
        refused: why a part that autograd runs cannot go on, as this rank has reported it.
    """

    def __init__(self) -> None:
        self.busy = False
        self.doing: str | None = None
        self.refused = ""
        self._last = ""  # the part that ran last
        self._since = time.monotonic()  # when this rank began what it does, or came back from it
        self._issued_before = 0
        self._comm_stats = CommStats()
        self._events = EventLog()

    def follow(self, comm_stats: CommStats, events: EventLog) -> None:
        """A model counts its collectives and records its events here."""
        self._comm_stats, self._events = comm_stats, events

    def start(self, doing: str) -> None:
        """This part begins."""
        self.doing, self._since, self.refused = doing, time.monotonic(), ""
        self._issued_before = self._comm_stats.issued

    def refuse(self, error: BaseException) -> None:
        """`error` was raised inside a backward, from which autograd brings none: if it is ours others shall hear it."""
        if isinstance(error, FlatFSDPError):
            self.refused = f" after {type(error).__name__}: {error}"

    def rest(self) -> None:
        """Back to between iterations, where this rank waits for nobody."""
        self._last, self._since = self.doing or self._last, time.monotonic()
        self.doing = None
        self.busy = False

    @property
    def issued(self) -> int:
        """How many collectives were issued in this part."""
        return self._comm_stats.issued - self._issued_before

    def describe(self, step: int) -> tuple[str, float]:
        """What this rank does, to follow "rank 0: ", and since when by `time.monotonic()`. Called by the watchdog."""
        doing, since, when = self.doing, self._since, f"in step {max(1, step)}"
        if doing is None:
            left = f"since {self._last} {when}" if self._last else "before the model's first step"
            return f"in the program's own code {left}", since
        if math.isinf(blocked_since()):
            return f"computing in {doing}, {when}", since
        last = "; ".join(map(str, self._events.tail(2)))
        return f"waiting in {doing}, {when}{f' (last: {last})' if last else ''}", since

    def describe_last(self, step: int) -> str:
        """What this rank did last, to follow a sentence; "" where it did nothing. Called as the process ends."""
        last = self.doing or self._last
        return f", after {last} in step {max(1, step)}" if last else ""
