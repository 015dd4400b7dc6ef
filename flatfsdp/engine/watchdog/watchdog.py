"""Reports between ranks outside of collectives: the thread that explains a wait, or the end of a rank.

[Note: watch] A rank that waits in a collective while its peers are in another one cannot learn that by a collective,
only through the store of the default process group. A rank that does something unexpected leaves a note there and
raises an *alarm*. On every rank one daemon thread reads the number of alarms once per period (`PERIOD`, or longer with
so many ranks that the store would have more than `READS` such reads per second); nothing else is read or written in
normal operation. The thread runs from a model's first forward, or the first wait before it, until the process group is
destroyed: it also answers for models that were deleted ([Note: deleted models]). If the store does not answer, a second
thread checks the limits of waits ([Note: unresponsive store]).

The cost in a world of W ranks, in requests to the store:

- in normal operation, one read per rank and period: at most min(W, `READS`) per second in total;
- per alarm, one count and one note by the rank that raises it, and two reads by every rank;
- per meeting of notes ([Note: agreement]), four requests by every rank, and its checks for the outcome at growing
  intervals; one rank removes the W notes of the previous meeting, and only a rank that composes an error reads all W;
- per status poll ([Note: status poll]), four requests by every rank and its checks for the result, and 3 W by one rank;
- three or four requests by every process at its beginning, and two or three at its end.

An increment is two requests, since the value is read and validated first. [Note: trust]

During the creation of communicators, comparisons of models and meetings of notes, every wait of more than two periods
leads to polls at growing intervals: two ranks that wait for each other in different places never meet, and no
connection breaks there when a rank dies.

A blocked wait cannot be canceled: gloo's `abort` blocks as well, and after the abort of an NCCL kernel the host would
continue with garbage. So the thread prints the message and gives the main thread `GRACE` seconds to return, which it
does if the parted ranks close their connections; otherwise the thread ends the process.

[Note: finalizers] The garbage collector may run a finalizer between any two instructions of any thread, also inside of
the methods of a `threading.Event`, which hold a lock: a finalizer that sets the same event waits for that lock forever.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, cast

import torch.distributed as dist

from ...errors import AgreementError, FlatFSDPError, LostRankError, WaitError
from ..base import wait_limits as waits
from ..base.foreign_text import parse
from ..base.processes import ProcessIdentity
from . import status_report as reports
from .local_waits import BlockFailure, LocalWaits, SharedBlocks, Timekeeper
from .process_exit import end_process_unless, in_words, print_immediately
from .store import AlarmReader, StoreClient, StoreGone, does_not_answer, where_it_was

JOIN = 10.0  # seconds that the thread has to finish its output when the interpreter exits
OUTLAST = 10.0  # seconds for which a process that ends waits for others that may still need it in a collective
MISSED = 3.0  # periods without an answer of the store after which the second thread takes over
MODELS = 64  # the last ones, whose progress is reported
PATIENCE = 1800.0  # seconds to wait for the notes of the others, which may be late legitimately: torch's own limit


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
        with contextlib.suppress(Empty):
            self._requests.get(timeout=seconds)


class Watchdog:
    """The thread of one default process group, and the models that it watches.

    Attributes:
        abandoned: whether no wait for other ranks can complete any more, also one that has yet to begin.
    """

    def __init__(self, store: StoreClient, *, rank: int, world: int, time_limit: float = math.inf) -> None:
        """`time_limit`: the process group's timeout in seconds."""
        self.store = store
        self._rank = rank
        self._polls = reports.StatusPoll(store, rank=rank, world=world)
        self._local = LocalWaits(store, time_limit=time_limit, period=self._period)
        self._blocks = SharedBlocks()
        # Of models that live, and of the last ones deleted: how to answer alarms.
        self._past: list[tuple[weakref.ref[Any], Callable[[str], bool]]] = []
        self._open: list[str] = []  # alarms that models have yet to process
        self._lock = threading.Lock()
        self._wake = Wake()  # [Note: finalizers]
        self._thread: threading.Thread | None = None
        # Of the last models, by their names in the store; it outlives them, and the watch.
        self.progress: dict[str, reports.Progress] = {}
        # Collectives for which this rank does not wait, and whether the ranks of their model have diverged.
        self._works: list[tuple[Any, Callable[[], object]]] = []
        self._closed = False
        self._store_is_gone = False
        # Set while the main thread, after a lost connection, waits until the first is true; and the poll's purpose.
        self._requested_poll: tuple[Callable[[], Any], reports.Purpose] | None = None
        self._lost: AgreementError | None = None  # the error for the main thread to raise
        self.abandoned = False
        self._timekeeper = Timekeeper(store, period=self._period, patience=MISSED, judge=self._judge_without_store)
        atexit.register(close_watch, weakref.ref(self))
        self._timekeeper.start(self._runs)
        self._alarms = AlarmReader(store, self._period)
        store.post(f"here/{rank}", json.dumps(ProcessIdentity.this()))

    def _period(self) -> float:
        return self._polls.period

    def add(self, watched: Any, consider: Callable[[str], bool]) -> None:
        """Watch `watched`, an `OpSequence`; starts the thread if none runs. When it is deleted `consider`, which must
        not reference it, answers the alarms of other ranks in its place: True if an alarm needs nothing more of this
        rank."""
        with self._lock:
            self._local.watched.add(watched)
            deleted = [each for each in self._past if each[0]() is None]
            forgotten = deleted[: max(0, len(deleted) - MODELS)]
            self._past = [each for each in self._past if each not in forgotten]
            self._past.append((weakref.ref(watched), consider))
            self._start()

    def follow(self, scope: str, progress: reports.Progress) -> None:
        """Report the `progress` with the model `scope` to other ranks, also after that is deleted."""
        self.progress[scope] = progress
        while len(self.progress) > MODELS:
            del self.progress[next(iter(self.progress))]

    def progress_with_living(self) -> dict[str, reports.Progress]:
        """The progress with models that exist: with deleted ones, ranks may have stopped in different steps."""
        living = [each.progress for each in list(self._local.watched)]
        return {scope: each for scope, each in [*self.progress.items()] if any(each is known for known in living)}

    @contextlib.contextmanager
    def waiting(self, ranks: Sequence[int], what: str, *, ends_by_notes: bool = False) -> Iterator[None]:
        """A context for code that waits until all `ranks` have come to the operation that `what` describes.

        `ends_by_notes`: or until it has read in their notes that they are not.

        Raises:
            LostRankError: a connection broke.
        """
        with self._lock:
            around = self._local.announce(ranks, what, ends_by_notes=ends_by_notes)
            self._start()
        try:
            yield
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            raise self.explain(error) from error
        finally:
            self._local.end(around)
            self._wake.set()

    @contextlib.contextmanager
    def fail_together(self, what: str) -> Iterator[Callable[[BaseException], None]]:
        """A context for code that all ranks run: if one fails in it, ranks that wait for it there fail, too."""
        block = self._blocks.name(what)
        reported = False

        def report(error: BaseException) -> None:
            nonlocal reported
            if reported or isinstance(error, AgreementError):  # all ranks get an AgreementError by other channels
                return
            reported = True
            with contextlib.suppress(RuntimeError):  # the store is gone; the current exception matters more
                words = f"failed in {what} with {in_words(error)}"
                self.store.raise_alarm(json.dumps(["failed", block, self._rank, words]))

        with self._lock:
            self._blocks.inside.append(block)
            self._start()
        try:
            yield report
        except BaseException as error:
            report(error)
            raise
        finally:
            self._blocks.inside.remove(block)
            self._wake.set()

    def explain(self, error: BaseException, otherwise: Callable[[], Any] = lambda: None) -> AgreementError:
        """The error that explains `error`, a lost connection. Waits for the others' answers, some seconds at most, or
        until `otherwise()` is true."""
        broken = str(error).splitlines()[0] if str(error) else type(error).__name__
        self._requested_poll = lambda: self._lost or otherwise(), "timeout" if _RAN_OUT.search(broken) else "lost"
        self._wake.set()
        self.store.wait(
            lambda: self._lost or otherwise() or not self._is_alive, 4 * reports.ANSWER * self._polls.period
        )
        self._requested_poll = None
        if self._lost is not None:
            return self._lost
        seconds = self.store.unanswered_for()
        if seconds > self._polls.period:
            return LostRankError(f"a connection to another rank broke: {broken}. {does_not_answer(seconds)}")
        try:
            self.store.count("alarms", 0)
        except RuntimeError as gone:
            return LostRankError(f"{gone}: {reports.server_ended()}. A connection to another rank broke: {broken}")
        return LostRankError(
            "a connection to another rank broke, and no rank reported why. Find out what ended the other ranks, or "
            f"whether their network failed: {broken}"
        )

    def abandon(self, error: AgreementError) -> None:
        """Let everything that waits for other ranks, or will, raise `error`. Called from any thread, by code that
        breaks connections itself: nothing is printed, and the process goes on."""
        self._lost, self.abandoned = error, True
        for each in list(self._local.watched):
            each.fail(error, None)
        self._wake.set()

    def last_step(self) -> str:
        """The last step of this rank with a model, in words that follow a sentence; "" if there is none."""
        models = sorted(self._local.watched, key=lambda each: each.doing[1])
        return models[-1].last_step if models else ""

    def outlast(self, works: Sequence[Any], diverged: Callable[[], object]) -> None:
        """Let this process end only when the other ranks have finished these collectives, too, for which it does not
        wait: they would lose their connection to it. Once they have `diverged` some may never issue them."""
        self._works = [each for each in self._works if not each[0].is_completed()]
        self._works += [(work, diverged) for work in works]

    def finish_works(self, *, failed: bool = False) -> None:
        """Wait for those of `outlast`, at the end of the process, while the thread still answers. `failed`: the process
        ends by an exception, and the others cannot continue."""
        if failed:
            self._works = []

        def over() -> object:
            return self._lost or all([work.is_completed() or diverged() for work, diverged in self._works])

        self.store.wait(over, OUTLAST)
        self._works = []  # which keep process groups, and these this watch

    def close(self, *, destroyed: bool = False) -> None:
        """Stop the threads: otherwise the interpreter's exit would end them in the middle of a call. `destroyed`: the
        process group was destroyed, and this process continues."""
        self.finish_works()
        self._closed = True
        self._wake.set()
        if destroyed and self.store.unanswered_for() < self._polls.period:
            with contextlib.suppress(RuntimeError):  # the store is gone
                words = f"destroyed its process group{self.last_step()}"
                self.store.post(f"left/{self._rank}", reports.ExitRecord(self._rank, words).left_now())
        deadline = time.monotonic() + JOIN
        for thread in (self._thread, self._timekeeper.stop()):
            while thread not in (None, threading.current_thread()) and thread.is_alive():
                # A thread that waits for an unresponsive store stays until the process ends.
                if time.monotonic() > deadline or self.store.unanswered_for() > self._polls.period:
                    break
                thread.join(timeout=0.1)

    @property
    def failure(self) -> AgreementError | None:
        """The error of the last wait that cannot complete."""
        return self._lost

    @property
    def _is_alive(self) -> bool:
        """Whether the thread runs and can still read and write notes."""
        return self._thread is not None and not self._store_is_gone

    # -- the thread --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="flatfsdp watch", daemon=True)
            self._thread.start()
            self._timekeeper.start(self._runs)

    def _runs(self) -> bool:
        return self._thread is not None

    def _run(self) -> None:
        try:
            while self._wanted():
                self._wake.wait(self._polls.period / 2 if self._polls.is_open else self._polls.period)
                if not self._closed:
                    self.look()
        except RuntimeError:  # the store is gone, and all notes with it
            self._store_is_gone = True
            self._outlive_the_store()

    def _wanted(self) -> bool:
        with self._lock:
            wants = self._past or self._local.watched or self._local.announced or self._blocks.inside
            if wants and not self._closed:
                return True
            self._thread = None
            return False

    def look(self) -> None:
        """Read new alarms, follow up on polls, and report waits."""
        self._receive()
        self._judge_failures()
        for number, result in self._polls.results():
            self._follow(number, result)
        if (since := self._local.resumed()) is not None:
            print_immediately(f"[flatfsdp, rank {self._rank}] resumed after {time.monotonic() - since:.0f} s")
        requested = self._requested_poll
        purpose = requested[1] if requested is not None and not requested[0]() else self._local.suspicion()
        if purpose is not None:
            self._polls.start(purpose, alarms=self._alarms.received)

    def _receive(self) -> None:
        ended = []
        for alarm in self._alarms.new():
            match parse(alarm):
                case ["poll", int(number), int(by), str(purpose)] if purpose in reports.PURPOSES:
                    status = self._local.status()._replace(progress=reports.numbers_of(self.progress_with_living()))
                    self._polls.answer(number, by, cast(reports.Purpose, purpose), status)
                case ["ended", int(number)]:
                    ended.append(number)
                case ["failed", str(block), int(rank), str(words)] if rank != self._rank:
                    self._blocks.failures.append(BlockFailure(block, rank, words))
                case [str(), int(), int() | None]:
                    self._open.append(alarm or "")
        if self._open:
            known: list[Callable[[str], bool]] = [each.consider for each in [*self._local.watched]]
            known += [consider for living, consider in [*self._past] if living() is None]
            self._open = [alarm for alarm in self._open if not all([consider(alarm) for consider in known])]
        for number in ended:  # after the alarms that preceded the end
            exit_record = reports.ExitRecord.read(self.store, number)
            if exit_record is not None and exit_record.rank != self._rank:
                self._lose([exit_record], leave=functools.partial(self._polls.let_all_read, f"ended/{number}"))

    def _judge_failures(self) -> None:
        """Fail if this rank waits, in a block, for a rank that failed there: after a time, since all may fail alike."""
        failures = self._blocks.failures_inside()
        if failures and time.monotonic() - self._local.waited()[0] > reports.ANSWER * self._polls.period:
            reported = "; ".join(f"rank {each.rank} {each.words}" for each in failures)
            self._blocks.failures = []
            self._fail(
                AgreementError(f"{reported}. The remaining ranks cannot continue"), [each.rank for each in failures]
            )

    # -- consequences of a status poll -------------------------------------------------------------------------------

    def _follow(self, number: int, result: reports.StatusReport) -> None:
        since, announced = self._local.waited()
        waited = time.monotonic() - since
        if result.purpose == "report":
            where = f"blocked for {waited:.0f} s" if waited > 2 * self._polls.period else "other ranks are waiting"
            lines = "\n".join(f"    {line}" for line in result.lines)
            print_immediately(
                f"[flatfsdp, rank {self._rank}] {where}. Status of all ranks (requested by rank {result.by}):\n{lines}"
            )
            self._local.reports()
        for rank, process in result.unresponsive.items():
            if process.is_gone():
                reports.report_gone(self.store, rank, process, by=self._rank)
        error: AgreementError | None = None
        stands_again = self._local.proves(result.standing, proving=result.purpose == "prove")
        if self._local.proves_parted(result.parted_in) and announced is not None:
            error = AgreementError(
                f"ranks wait for each other in different places: {result.parted}. Wrap the same module over the same "
                "process group or mesh, with the same strategy, on every rank, and make collective calls on all of them"
            )
        elif result.purpose in ("raise", "timeout"):
            limit = f"more than {waits.limits.raise_after or waited:.0f} s (set_collective_timeout(raise_after=...))"
            if result.purpose == "timeout":
                limit = "as long as their process group allows (timeout= of init_process_group or new_group)"
            error = WaitError(f"ranks waited for {limit}: {'; '.join(result.lines)}")
        elif stands_again:
            error = AgreementError(
                f"ranks wait for each other, and none can continue: {'; '.join(result.lines)}. Make collective calls "
                "on all ranks, in the same order"
            )
        leave = functools.partial(self._polls.let_all_read, f"poll/{number}", result.answered)
        if error is not None:
            self._fail(error, None, leave=leave)
            return
        lost = [*result.lost]
        if result.purpose == "lost":
            lost += [
                reports.ExitRecord(rank, f"was killed, or crashed: {process} does not answer")
                for rank, process in result.unresponsive.items()
                if process.is_gone() is not False  # a machine may be too busy for an answer
            ]
        if lost:
            self._lose(lost, leave=leave)
        elif result.purpose == "lost" and self._requested_poll is not None:
            self._lost = LostRankError(
                f"a connection to another rank broke, though all ranks answer: {'; '.join(result.lines)}. A rank may "
                "have destroyed its process group, or its network may have failed"
            )

    def _lose(self, lost: Sequence[reports.ExitRecord], *, leave: Callable[[], None]) -> None:
        self._fail(
            LostRankError(reports.in_one_sentence(lost, self.progress_with_living(), rank=self._rank)),
            [each.rank for each in lost],
            leave=leave,
        )

    def _fail(
        self, error: AgreementError, ranks: Sequence[int] | None, *, leave: Callable[[], None] | None = None
    ) -> None:
        """Fail everything that needs one of `ranks` (None: any other): the main thread raises `error` at its next step,
        if it reaches one. `leave` gives the others time to read it, before this process ends and possibly the store
        with it."""
        if leave is not None and self._lost is None:
            leave()
        since, announced = self._local.waited()
        watched = list(self._local.watched)
        concerned = [each for each in watched if each.fail(error, ranks)]
        if announced is not None:
            waits_in_vain = ranks is None or not set(announced.ranks).isdisjoint(ranks)
        else:
            waits_in_vain = any(each in concerned for each in [each for each in watched if each.busy] or watched)
        if concerned or waits_in_vain:
            self._lost = error
        if waits_in_vain and math.isfinite(since):
            print_immediately(f"[flatfsdp, rank {self._rank}] {type(error).__name__}: {error}")
            end_process_unless(lambda: self._local.waited()[0] != since)

    def _outlive_the_store(self) -> None:
        """Fail long waits without polls: the awaited rank served the lost store, or has lost it, too."""
        gone_at = time.monotonic()
        while self._wanted():
            self._wake.wait(self._polls.period)
            since, _ = self._local.waited()
            if time.monotonic() - max(since, gone_at) > 3 * reports.ANSWER * self._polls.period and math.isfinite(
                since
            ):
                self._fail(
                    LostRankError(
                        f"the store of the process group{where_it_was()} is gone, and this rank waits for others: "
                        f"{reports.server_ended()}"
                    ),
                    None,
                )

    def _judge_without_store(self, seconds: float) -> None:
        """Enforce the limits of this rank's wait while the store does not answer. Called by the timekeeper."""
        since, announced = self._local.waited()
        waited = time.monotonic() - since
        in_store = announced is None and math.isinf(waits.blocked_since())
        doing = "waiting for the store" if in_store else self._local.status().doing
        if waited > waits.limits.report_after and not self._local.is_reported:
            self._local.reports()
            print_immediately(f"[flatfsdp, rank {self._rank}] {doing}, for {waited:.0f} s. {does_not_answer(seconds)}")
        if (passed := self._local.passed()) is not None:
            limit = (
                "set_collective_timeout(raise_after=...)"
                if passed[0] == "raise"
                else "the time limit of the process group"
            )
            reported = f"this rank waited for {passed[1]:.0f} s ({limit}), {doing}. {does_not_answer(seconds)}"
            self._fail(WaitError(reported), None)


# Timeouts in messages of gloo and of torch's stores.
_RAN_OUT = re.compile("Timed out waiting|wait timeout")


def is_lost_connection(error: BaseException) -> bool:
    """Whether `error` means that a backend lost its peers; gloo raises a plain `RuntimeError` then."""
    if isinstance(error, (dist.DistError, StoreGone)):
        return True
    is_ours = isinstance(error, FlatFSDPError)
    return isinstance(error, RuntimeError) and not is_ours and "gloo" in str(error).lower()


def close_watch(watch: weakref.ref[Watchdog], *, destroyed: bool = False) -> None:
    """Close the watch if it still exists."""
    found = watch()
    if found is not None:
        found.close(destroyed=destroyed)
