"""The current waits of this rank, the decision when to poll the other ranks, and the blocks that all ranks run.

[Note: unresponsive store] A request to a store whose server is stopped, or unreachable, does not return: no error, no
time limit. Then the watch can neither read nor write notes ([Note: watch]), and cannot even check how long this rank
has been waiting. So a second thread checks only the clock and the time since the oldest unanswered request. While that
time is short it reports nothing, since the watch can report more.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..base import wait_limits as waits
from .status_report import ANSWER, BETWEEN_POLLS, ENTERED, Purpose, RankStatus, digest_of_wait
from .store import StoreClient


@dataclass(frozen=True)
class AnnouncedWait:
    """A wait of this rank for `ranks`, before a model's first iteration or in a call between iterations."""

    ranks: tuple[int, ...]
    what: str
    since: float
    ends_by_notes: bool


class LocalWaits:
    """The waits of this rank.

    Attributes:
        watched: the models, as weak references to their `OpSequence` objects.
        announced: the current wait of each thread.
    """

    def __init__(self, store: StoreClient, *, time_limit: float, period: Callable[[], float]) -> None:
        """`time_limit`: the process group's timeout in seconds; `period`: the seconds between two checks."""
        self.watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._store = store
        self._time_limit = time_limit
        self._period = period
        self.announced: dict[int, AnnouncedWait] = {}
        self._next_poll = 0.0  # seconds into an announced wait, at which to poll again
        self._reported: float | None = None  # the beginning of the wait that was reported
        self._standing, self._standing_since = "", 0.0  # the waits of all ranks [Note: deadlock]
        self._parted, self._parted_since = "", 0.0  # the waits in which ranks were found parted [Note: parted]
        self._entered: dict[tuple[str, tuple[int, ...]], int] = {}  # numbers of entries by wait, the latest last

    def announce(self, ranks: Sequence[int], what: str, *, ends_by_notes: bool) -> AnnouncedWait | None:
        """Record that this thread waits for `ranks`; returns the enclosing wait. Waits that do not keep the program are
        not recorded. [Note: waits]"""
        before = self.announced.get(threading.get_ident())
        if waits.keeps_program():
            if not ends_by_notes:
                wait = what, tuple(ranks)
                self._entered[wait] = self._entered.pop(wait, 0) + 1
            self.end(AnnouncedWait(tuple(ranks), what, time.monotonic(), ends_by_notes))
        return before

    def end(self, around: AnnouncedWait | None) -> None:
        """Record the end of this thread's wait, inside the enclosing wait `around`."""
        if around is not None:
            self.announced[threading.get_ident()] = around
        else:
            self.announced.pop(threading.get_ident(), None)

    def waited(self) -> tuple[float, AnnouncedWait | None]:
        """The time at which this process began to wait (infinity if it does not), and its announced wait, if any."""
        announced = min(list(self.announced.values()), key=lambda wait: wait.since, default=None)
        since = min(waits.blocked_since(), self._store.waiting_since())
        return (since, None) if announced is None else (min(since, announced.since), announced)

    def passed(self) -> tuple[Purpose, float] | None:
        """The limit that this rank's wait has exceeded, and its seconds; None if there is none."""
        since, announced = self.waited()
        now, chosen = time.monotonic(), waits.limits.raise_after
        if chosen is not None and now - since > chosen:
            return "raise", chosen
        # The program's own operations have the limits of their own groups.
        ours = min(waits.blocked_since(by_ours=True), math.inf if announced is None else announced.since)
        limit = max([self._time_limit, *(each.time_limit for each in list(self.watched))])
        if now - ours > limit - min(2 * self._period(), limit / 4):  # leaves time to poll the others
            return "timeout", limit
        return None

    def status(self) -> RankStatus:
        """The current status of this rank."""
        now = time.monotonic()
        since, announced = self.waited()
        stands = waits.standing()
        if announced is not None:
            ranks = () if announced.ends_by_notes else announced.ranks
            last = itertools.islice(reversed(self._entered.copy().items()), ENTERED)
            entered = {digest_of_wait(*wait): count for wait, count in last}
            return RankStatus(announced.what, now - announced.since, ranks, (announced.since, *stands), entered)
        watched = [each.doing for each in sorted(self.watched, key=lambda each: not each.busy)]
        if not watched:
            return RankStatus("in the program's own code, without a model", now - min(since, now), stands=stands)
        doing, began = watched[0]
        return RankStatus(doing, now - (began if math.isinf(since) else since), stands=stands)

    def suspicion(self) -> Purpose | None:
        """The purpose for which to poll the others now; None if there is no reason to."""
        since, announced = self.waited()
        waited = time.monotonic() - since
        if (passed := self.passed()) is not None:
            return passed[0]
        if waited > waits.limits.report_after and self._reported is None:
            return "report"
        between_proofs = max(waits.limits.report_after, ANSWER * self._period())
        if self._standing and math.isfinite(since) and time.monotonic() - self._standing_since > between_proofs:
            return "prove"
        if announced is None or waited < 2 * self._period():
            self._next_poll = 2 * self._period()
        elif waited > self._next_poll:
            self._next_poll = 2 * waited
            return "meet"
        return None

    def reports(self) -> None:
        """Record that the current wait has been reported."""
        since, _ = self.waited()
        self._reported = since if math.isfinite(since) else None

    @property
    def is_reported(self) -> bool:
        """Whether the current wait was reported."""
        return self._reported == self.waited()[0]

    def resumed(self) -> float | None:
        """The beginning of a reported wait that is over now; None if there is none, or it was returned before."""
        before = self._reported
        if before is None or self.is_reported:
            return None
        self._reported = None
        return before

    def proves(self, standing: str, *, proving: bool) -> bool:
        """Whether ranks are `standing` exactly as in the poll before; `proving`: this poll is held to prove that."""
        again = proving and standing != "" and standing == self._standing
        if proving or standing != self._standing:
            self._standing, self._standing_since = standing, time.monotonic()
        return again

    def proves_parted(self, waits: str) -> bool:
        """Whether the ranks that a poll found parted in `waits` ("" for none) were already so long enough ago."""
        now = time.monotonic()
        if waits != self._parted:
            self._parted, self._parted_since = waits, now
        return waits != "" and now - self._parted_since > BETWEEN_POLLS * self._period()


@dataclass(frozen=True)
class BlockFailure:
    """A rank that failed, by an exception, in a block of code that all ranks run."""

    block: str
    rank: int
    words: str


class SharedBlocks:
    """Blocks of code that all ranks run, and in which all fail if one does.

    Attributes:
        inside: the blocks that the main thread is in.
        failures: failures of other ranks, in blocks that this one may be in.
    """

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.failures: list[BlockFailure] = []
        self._entered: Counter[str] = Counter()  # numbers of blocks by name, the same on all ranks

    def name(self, what: str) -> str:
        """A name for the next block called `what`, the same on all ranks."""
        self._entered[what] += 1
        return f"{what}, number {self._entered[what]}"

    def failures_inside(self) -> list[BlockFailure]:
        """The failures in blocks that this rank is in; others are dropped."""
        self.failures = [each for each in self.failures if each.block in self.inside]
        return self.failures


class Timekeeper:
    """The second thread of a watch, which needs no store. [Note: unresponsive store]"""

    def __init__(
        self, store: StoreClient, *, period: Callable[[], float], patience: float, judge: Callable[[float], None]
    ) -> None:
        """Once per period, call `judge` with the seconds for which the store has not answered, if these are more than
        `patience` periods."""
        self._store = store
        self._period = period
        self._patience = patience
        self._judge = judge
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._wanted: Callable[[], bool] = lambda: False
        self._thread: threading.Thread | None = None

    def start(self, wanted: Callable[[], bool]) -> None:
        """Run the thread for as long as `wanted()` is true or a request to the store is unanswered."""
        with self._lock:
            self._wanted = wanted
            if self._thread is None and not self._over.is_set():
                self._thread = threading.Thread(target=self._run, name="flatfsdp watch's clock", daemon=True)
                self._thread.start()

    def stop(self) -> threading.Thread | None:
        """Let the thread end; returns it, or None if none runs."""
        self._over.set()
        return self._thread

    def _run(self) -> None:
        while not self._over.wait(self._period()) and self._goes_on():
            seconds = self._store.unanswered_for()
            if seconds > self._patience * self._period():
                self._judge(seconds)

    def _goes_on(self) -> bool:
        with self._lock:
            if self._wanted() or self._store.unanswered_for():
                return True
            self._thread = None
            return False
