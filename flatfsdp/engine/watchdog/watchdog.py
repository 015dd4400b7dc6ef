"""Words between ranks outside of collectives: the thread that turns a wait, or the end of a rank, into a sentence.

[Note: watch] A rank that waits in a collective for peers that went elsewhere cannot be told so by a collective. What is
left is the store of the default process group. A rank that does something unexpected leaves a note there and sounds an
*alarm*. On every rank one daemon thread reads the number of alarms once per period (`PERIOD`, more where ranks are so
many that the store would have more than `READS` such reads per second); nothing else is read or written as long as all
is well. The thread runs from a model's first forward, or the first wait before it, until its models are gone, or the
process group is destroyed. Limits of waiting are judged beside it where the store does not answer ([Note: silent
store]).

What it costs in a world of W ranks, in requests to the store:

- while all is well, one read per rank and period, so at most min(W, `READS`) per second in all;
- per alarm, one count and one note by who sounds it, and two reads by every rank;
- per meeting of notes ([Note: agreement]), four requests by every rank and its looks for the outcome, ever more rarely;
  one rank removes the W notes of the meeting before. Only who words an error reads all W notes;
- per roll call ([Note: roll call]), four requests by every rank and its looks for the result, and 3 W by one rank;
- at its beginning and at its end, two or three requests by every process.

A count that adds is two requests: what stands there is looked at first. [Note: trust]

Where communicators are made, models compared and notes met, every wait of more than two periods leads to roll calls,
ever more rarely: two ranks that wait for each other in different places never meet, and no connection breaks there when
a rank dies.

A blocked wait cannot be called off: gloo's `abort` blocks as well, and an aborted NCCL kernel lets the host go on with
garbage. So the thread prints the sentence and leaves the main thread `GRACE` seconds to come back by itself, which it
does when the ranks that parted close their connections; only then it ends the process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch.distributed as dist

from ...errors import AgreementError, FlatFSDPError, LostRankError, WaitError
from ..base import _torch
from ..base import wait_limits as waits
from ..base.foreign_text import parse
from ..base.per_group import for_group
from .clock import Timekeeper
from .process_exit import at_end, in_words
from .status_report import (
    ANSWER,
    PURPOSES,
    QUIETLY,
    UNEVEN,
    ExitRecord,
    ProcessIdentity,
    Purpose,
    RankStatus,
    StatusPoll,
    StatusReport,
    in_one_sentence,
)
from .store import KEPT, StoreClient, StoreGone, launcher_serves_it, where_it_was, who_serves_it

GRACE = 4.0  # seconds that a blocked main thread gets to come back before its process is ended
JOIN = 10.0  # seconds that the thread gets to finish what it says, when the interpreter ends
LAST_ERRANDS = 0.3  # seconds that errands get then
SILENCE = 3.0  # periods without an answer of the store after which the watch cannot be relied on
PATIENCE = 1800.0  # seconds to wait for the notes of the others, which may be late for good reasons: torch's own bound


class Watched(Protocol):
    """What the thread looks after, held weakly: the agreement of one model."""

    @property
    def busy(self) -> bool:
        """Whether this rank is inside an iteration, where it may be waiting for others."""

    @property
    def doing(self) -> tuple[str, float]:
        """What this rank does with the model, to follow "rank 0: ", and since when."""

    @property
    def time_limit(self) -> float:
        """Seconds that the model's process groups give an operation."""

    @property
    def last_step(self) -> str:
        """What this rank did last with the model, to follow a sentence; "" if it did not run yet."""

    def consider(self, alarm: str) -> bool:
        """Judge an alarm, by the reading of the store at most; True when it is of no interest any more."""

    def fail(self, error: AgreementError, ranks: Sequence[int] | None) -> bool:
        """Go on with nothing that needs one of `ranks` (None: any other), because of `error`; whether that is so."""


@dataclass(frozen=True)
class BlockFailure:
    """A rank that failed, by an exception, in a block of code that all ranks run."""

    block: str
    rank: int
    words: str


@dataclass(frozen=True)
class AnnouncedWait:
    """Where this rank waits for `ranks` before a model's first iteration, or in a call between iterations."""

    ranks: tuple[int, ...]
    what: str
    since: float
    settled_by_notes: bool


class Watchdog:
    """The thread of one default process group, and who is watched."""

    def __init__(self, store: StoreClient, *, rank: int, world: int, time_limit: float = math.inf) -> None:
        """`time_limit`: the seconds that the process group gives an operation."""
        self.store = store
        self._rank = rank
        self._time_limit = time_limit
        self._calls = StatusPoll(store, rank=rank, world=world)
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._last_words: list[tuple[weakref.ref[Any], Callable[[], None]]] = []  # of which models
        self._gap_since = math.inf  # when an alarm was found counted, but not written
        self._open: list[str] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._store_is_gone = False
        self._waits: dict[int, AnnouncedWait] = {}  # by thread
        self._blocks: Counter[str] = Counter()  # how many of a name were entered: ranks count alike
        self._inside: list[str] = []  # of blocks, those that the main thread is in
        self._failures: list[BlockFailure] = []  # of other ranks, in blocks that this one may be in
        self._errands: list[Callable[[], bool]] = []  # of others, done when the thread looks
        self._next_poll = 0.0  # seconds into a wait of the kind above, at which to ask again
        self._reported: float | None = None  # since when the wait lasts that was reported
        self._standing, self._standing_since = "", 0.0  # where all ranks were found waiting [Note: deadlock]
        self._requested_poll: Callable[[], Any] | None = (
            None  # the main thread lost a connection, and waits until this is true
        )
        self._poll_reason: Purpose = "lost"
        self._lost: AgreementError | None = None  # what it is to raise
        self._timekeeper = Timekeeper(
            store, period=lambda: self._calls.period, patience=SILENCE, judge=self._judge_in_silence
        )
        atexit.register(_close, weakref.ref(self))
        self._timekeeper.start(self._runs)
        self._received = store.count("alarms", 0)
        store.post(f"here/{rank}", ProcessIdentity.this().to_text())

    def add(self, watched: Watched, publish: Callable[[], None] = lambda: None) -> None:
        """Look after `watched` until it is gone; starts the thread if none runs. When it is gone, or the watch ends,
        `publish`, which must not hold it, writes to the store what others may still ask of it."""
        with self._lock:
            self._watched.add(watched)
            self._last_words.append((weakref.ref(watched), publish))
            weakref.finalize(watched, self._wake.set).atexit = False
            self._start()

    def run(self, errand: Callable[[], bool]) -> None:
        """Let the thread call `errand`, soon and then once per period, until it returns True."""
        with self._lock:
            self._errands.append(errand)
            self._start()
        self._wake.set()

    @contextlib.contextmanager
    def waiting(self, ranks: Sequence[int], what: str, *, settled_by_notes: bool = False) -> Iterator[None]:
        """The enclosed code waits until all `ranks` are at the same place; `what` says which one.

        `settled_by_notes`: or until it has heard from them that they are not.

        Raises:
            LostRankError: a connection broke.
        """
        thread = threading.get_ident()
        before = self._waits.get(thread)
        with self._lock:
            if threading.current_thread() is threading.main_thread():  # others wait beside what the rank does
                self._waits[thread] = AnnouncedWait(tuple(ranks), what, time.monotonic(), settled_by_notes)
            self._start()
        try:
            yield
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            raise self.explain(error) from error
        finally:
            if before is not None:
                self._waits[thread] = before
            else:
                self._waits.pop(thread, None)
            self._wake.set()

    @contextlib.contextmanager
    def fail_together(self, what: str) -> Iterator[Callable[[BaseException], None]]:
        """The enclosed block is run by all ranks: where one fails in it, those that wait for it there fail, too."""
        self._blocks[what] += 1
        block = f"{what}, number {self._blocks[what]}"
        told = False

        def tell(error: BaseException) -> None:
            nonlocal told
            if told or isinstance(error, AgreementError):  # which all ranks learn by other channels
                return
            told = True
            with contextlib.suppress(RuntimeError):  # the store is gone; what is under way matters more
                words = f"failed in {what} with {in_words(error)}"
                self.store.raise_alarm(json.dumps(["failed", block, self._rank, words]))

        with self._lock:
            self._inside.append(block)
            self._start()
        try:
            yield tell
        except BaseException as error:
            tell(error)
            raise
        finally:
            self._inside.remove(block)
            self._wake.set()

    def explain(self, error: BaseException, otherwise: Callable[[], Any] = lambda: None) -> AgreementError:
        """What is behind `error`, a lost connection. Waits for the others' answers, some seconds at most, or until
        `otherwise()` is true."""
        broken = str(error).splitlines()[0] if str(error) else type(error).__name__
        self._poll_reason = "timeout" if _RAN_OUT.search(broken) else "lost"
        self._requested_poll = lambda: self._lost or otherwise()
        self._wake.set()
        self.store.wait(lambda: self._lost or otherwise() or not self._is_alive, 4 * ANSWER * self._calls.period)
        self._requested_poll = None
        if self._lost is not None:
            return self._lost
        silent = self.store.silent_for()
        if silent > self._calls.period:
            return LostRankError(f"a connection to another rank broke: {broken}. {_does_not_answer(silent)}")
        try:
            self.store.count("alarms", 0)
        except RuntimeError as gone:
            return LostRankError(f"{gone}: {_server_ended()}. A connection to another rank broke: {broken}")
        return LostRankError(
            "a connection to another rank broke, and no rank reported why. Look for what ended the other ranks, or "
            f"their network: {broken}"
        )

    def last_step(self) -> str:
        """What this rank did last with a model, to follow a sentence; "" where there is none."""
        models = sorted(self._watched, key=lambda each: each.doing[1])
        return models[-1].last_step if models else ""

    def close(self) -> None:
        """Stop the threads: at the end of the interpreter they would die in the middle of a call."""
        self._closed = True
        self._wake.set()
        if self.store.silent_for() < self._calls.period:
            with contextlib.suppress(RuntimeError):  # the store is gone
                self._publish_last_words(of_all=True)
        deadline = time.monotonic() + JOIN
        for thread in (self._thread, self._timekeeper.stop()):
            while thread not in (None, threading.current_thread()) and thread.is_alive():
                # One that waits for a silent store stays until the process ends.
                if time.monotonic() > deadline or self.store.silent_for() > self._calls.period:
                    break
                thread.join(timeout=0.1)
        if self._errands and not self.store.silent_for():
            with contextlib.suppress(RuntimeError):  # the store is gone
                self.store.wait(self._run_errands, LAST_ERRANDS)

    @property
    def failure(self) -> AgreementError | None:
        """What ended the last wait that was in vain."""
        return self._lost

    @property
    def _is_alive(self) -> bool:
        """Whether the thread can still be told anything."""
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
                self._wake.wait(self._calls.period / 2 if self._calls.is_open else self._calls.period)
                self._wake.clear()
                if not self._closed:
                    self.look()
            if not self._closed:
                self._publish_last_words()
        except RuntimeError:  # the store is gone, and with it whatever it could tell
            self._store_is_gone = True
            self._outlive_the_store()

    def _wanted(self) -> bool:
        with self._lock:
            if (self._watched or self._waits or self._inside) and not self._closed:
                return True
            self._thread = None
            return False

    def look(self) -> None:
        """Hear what is new, and say what is to be said."""
        self._receive()
        self._judge_failures()
        for number, result in self._calls.results():
            self._follow(number, result)
        purpose = self._suspicion()
        if purpose is not None:
            self._calls.ask(purpose, heard=self._received)
        self._run_errands()
        self._publish_last_words()

    def _publish_last_words(self, *, of_all: bool = False) -> None:
        with self._lock:  # the main thread, at the end, may meet the watch's here
            gone = [words for words in self._last_words if of_all or words[0]() is None]
            self._last_words = [words for words in self._last_words if words not in gone]
        for _, publish in gone:
            publish()

    def _run_errands(self) -> bool:
        """Go on with what others asked for; True when all of it is done."""
        for errand in [*self._errands]:
            if errand():
                self._errands.remove(errand)
        return not self._errands

    def _receive(self) -> None:
        ended = []
        sounded = self.store.count("alarms", 0)
        if not sounded - KEPT <= self._received <= sounded:  # those before were erased; or somebody else counted
            self._received = max(0, sounded - KEPT)
        while self._received < sounded:
            alarm = self.store.read(f"alarm/{self._received + 1}")
            if alarm is None:  # counted, not written yet; or somebody else counted
                self._gap_since = min(self._gap_since, time.monotonic())
                if time.monotonic() - self._gap_since < 2 * self._calls.period:
                    break
            else:
                self._gap_since = math.inf
            self._received += 1
            match parse(alarm):
                case ["roll", int(number), int(by), str(purpose)] if purpose in PURPOSES:
                    self._calls.answer(number, by, cast(Purpose, purpose), self._answer())
                case ["ended", int(number)]:
                    ended.append(number)
                case ["failed", str(block), int(rank), str(words)]:
                    self._failures.append(BlockFailure(block, rank, words))
                case [str(), int(), int() | None] | ["unused", str(), int(), bool()]:
                    self._open.append(alarm or "")
        watched = list(self._watched)
        self._open = [alarm for alarm in self._open if not all([each.consider(alarm) for each in watched])]
        for number in ended:  # after the alarms that led to it
            exit_record = ExitRecord.read(self.store, number)
            if exit_record is not None and exit_record.rank != self._rank:
                self._lose([exit_record], leave=functools.partial(self._calls.let_all_read, f"ended/{number}"))

    def _judge_failures(self) -> None:
        """Does this rank wait, in a block, for one that failed there? All may fail alike, each in its time."""
        self._failures = [each for each in self._failures if each.block in self._inside and each.rank != self._rank]
        if self._failures and time.monotonic() - self._waited()[0] > ANSWER * self._calls.period:
            reported = "; ".join(f"rank {each.rank} {each.words}" for each in self._failures)
            ranks = [each.rank for each in self._failures]
            self._failures = []
            self._fail(AgreementError(f"{reported}. The remaining ranks cannot continue"), ranks)

    def _waited(self) -> tuple[float, AnnouncedWait | None]:
        """Since when this process waits (infinity if it does not), and the wait that was announced, if one was."""
        announced = min(list(self._waits.values()), key=lambda wait: wait.since, default=None)
        since = min(waits.blocked_since(), self.store.asked_since(threading.main_thread()))
        return (since, None) if announced is None else (min(since, announced.since), announced)

    def _passed(self) -> tuple[Purpose, float] | None:
        """The limit that this rank's wait has come to, and its seconds."""
        since, announced = self._waited()
        now, chosen = time.monotonic(), waits.limits.raise_after
        if chosen is not None and now - since > chosen:
            return "raise", chosen
        # The program's own operations have the limits of their own groups.
        ours = min(waits.blocked_since(by_ours=True), math.inf if announced is None else announced.since)
        limit = max([self._time_limit, *(each.time_limit for each in list(self._watched))])
        if now - ours > limit - min(2 * self._calls.period, limit / 4):  # the others are still to be asked
            return "timeout", limit
        return None

    def _answer(self) -> RankStatus:
        now = time.monotonic()
        since, announced = self._waited()
        stands = waits.standing()
        if announced is not None:
            ranks = () if announced.settled_by_notes else announced.ranks
            return RankStatus(announced.what, now - announced.since, ranks, (announced.since, *stands))
        watched = [each.doing for each in sorted(self._watched, key=lambda each: not each.busy)]
        if not watched:
            return RankStatus("in the program's own code, without a model", now - min(since, now), stands=stands)
        doing, began = watched[0]
        return RankStatus(doing, now - (began if math.isinf(since) else since), stands=stands)

    def _suspicion(self) -> Purpose | None:
        """Why to ask what the others do, if there is a reason."""
        since, announced = self._waited()
        waited = time.monotonic() - since
        if self._reported is not None and since != self._reported:
            print_immediately(f"[flatfsdp, rank {self._rank}] resumed after {time.monotonic() - self._reported:.0f} s")
            self._reported = None
        if self._requested_poll is not None and not self._requested_poll():
            return self._poll_reason
        if (passed := self._passed()) is not None:
            return passed[0]
        if waited > waits.limits.report_after and self._reported is None:
            return "report"
        between_proofs = max(waits.limits.report_after, ANSWER * self._calls.period)
        if self._standing and math.isfinite(since) and time.monotonic() - self._standing_since > between_proofs:
            return "prove"
        if announced is None or waited < 2 * self._calls.period:
            self._next_poll = 2 * self._calls.period
        elif waited > self._next_poll:
            self._next_poll = 2 * waited
            return "meet"
        return None

    # -- what a roll call leads to -----------------------------------------------------------------------------------

    def _follow(self, number: int, result: StatusReport) -> None:
        since, announced = self._waited()
        waited = time.monotonic() - since
        if result.purpose == "report":
            where = f"blocked for {waited:.0f} s" if waited > 2 * self._calls.period else "others wait"
            lines = "\n".join(f"    {line}" for line in result.lines)
            print_immediately(
                f"[flatfsdp, rank {self._rank}] {where}. Status of all ranks (requested by rank {result.by}):\n{lines}"
            )
            self._reported = since if math.isfinite(since) else None
        for rank, process in result.silent_processes():
            if process.is_gone() and self.store.set_if_absent(f"gone/{rank}", "told") == "told":
                ExitRecord(rank, f"was killed, or crashed: {process} is gone").publish(self.store, alarm=True)
        error: AgreementError | None = None
        if result.parted and announced is not None:
            error = AgreementError(
                f"ranks wait for each other in different places: {result.parted}. Wrap the same module over the same "
                "process group or mesh, with the same strategy, on every rank, and make collective calls on all of them"
            )
        elif result.purpose in ("raise", "timeout"):
            limit = f"more than {waits.limits.raise_after or waited:.0f} s (set_collective_timeout(raise_after=...))"
            if result.purpose == "timeout":
                limit = "as long as their process group allows (timeout= of init_process_group or new_group)"
            error = WaitError(f"ranks waited for {limit}: {'; '.join(result.lines)}")
        elif result.purpose == "prove" and result.standing and result.standing == self._standing:
            error = AgreementError(
                f"ranks wait for each other, and none can go on: {'; '.join(result.lines)}. Make collective calls on "
                "all ranks, in the same order"
            )
        if result.standing != self._standing or result.purpose == "prove":
            self._standing, self._standing_since = result.standing, time.monotonic()
        leave = functools.partial(self._calls.let_all_read, f"roll/{number}", result.answered)
        if error is not None:
            self._fail(error, None, leave=leave)
            return
        lost = [ExitRecord(*each) for each in result.lost]
        if result.purpose == "lost":
            lost += [
                ExitRecord(rank, f"was killed, or crashed: {process} does not answer")
                for rank, process in result.silent_processes()
                if process.is_gone() is not False  # a machine may be too busy for an answer
            ]
        if lost:
            self._lose(lost, leave=leave)
        elif result.purpose == "lost" and self._requested_poll is not None:
            self._lost = LostRankError(
                f"a connection to another rank broke, though all ranks answer: {'; '.join(result.lines)}. A rank may "
                "have destroyed its process group, or its network failed"
            )

    def _lose(self, lost: Sequence[ExitRecord], *, leave: Callable[[], None]) -> None:
        self._fail(LostRankError(in_one_sentence(lost)), [each.rank for each in lost], leave=leave)

    def _fail(
        self, error: AgreementError, ranks: Sequence[int] | None, *, leave: Callable[[], None] | None = None
    ) -> None:
        """Nothing that needs one of `ranks` (None: any other) goes on: the main thread raises `error` at its next step,
        if it comes to one. `leave` gives the others time to hear of it, before this process and perhaps the store
        end."""
        if leave is not None and self._lost is None:
            leave()
        since, announced = self._waited()
        watched = list(self._watched)
        concerned = [each for each in watched if each.fail(error, ranks)]
        if announced is not None:
            waits_in_vain = ranks is None or not set(announced.ranks).isdisjoint(ranks)
        else:
            waits_in_vain = any(each in concerned for each in [each for each in watched if each.busy] or watched)
        if concerned or waits_in_vain:
            self._lost = error
        if waits_in_vain and math.isfinite(since):
            print_immediately(f"[flatfsdp, rank {self._rank}] {type(error).__name__}: {error}")
            end_process_unless(lambda: self._waited()[0] != since)

    def _outlive_the_store(self) -> None:
        """Nobody can be asked any more: a wait that goes on is for a rank that served the store, or lost it, too."""
        gone_at = time.monotonic()
        while self._wanted():
            self._wake.wait(self._calls.period)
            self._wake.clear()
            since, _ = self._waited()
            if time.monotonic() - max(since, gone_at) > 3 * ANSWER * self._calls.period and math.isfinite(since):
                self._fail(
                    LostRankError(
                        f"the store of the process group{where_it_was()} is gone, and this rank waits for others: "
                        f"{_server_ended()}"
                    ),
                    None,
                )

    def _judge_in_silence(self, silent: float) -> None:
        """Keep the limits of this rank's wait though the store does not answer. Called by the timekeeper."""
        since, announced = self._waited()
        waited = time.monotonic() - since
        asks = announced is None and math.isinf(waits.blocked_since())
        doing = "waiting for the store" if asks else self._answer().doing
        if waited > waits.limits.report_after and self._reported != since:
            self._reported = since
            print_immediately(f"[flatfsdp, rank {self._rank}] {doing}, for {waited:.0f} s. {_does_not_answer(silent)}")
        if (passed := self._passed()) is not None:
            limit = (
                "set_collective_timeout(raise_after=...)"
                if passed[0] == "raise"
                else "the time limit of the process group"
            )
            reported = f"this rank waited for {passed[1]:.0f} s ({limit}), {doing}. {_does_not_answer(silent)}"
            self._fail(WaitError(reported), None)


def _server_ended() -> str:
    """A rank that took the store with it could not tell how it ended: out of batches before the others, it may be."""
    return f"{who_serves_it()} has ended{'' if launcher_serves_it() else UNEVEN}"


def _does_not_answer(silent: float) -> str:
    return (
        f"The store of the process group{where_it_was()} has not answered for {silent:.0f} s, so nobody can be asked: "
        f"{who_serves_it()} is stopped, or cannot be reached"
    )


# Of gloo, and of torch's stores.
_RAN_OUT = re.compile("Timed out waiting|wait timeout")


def is_lost_connection(error: BaseException) -> bool:
    """Whether a backend lost its peers; gloo says so with a plain `RuntimeError`."""
    if isinstance(error, (dist.DistError, StoreGone)):
        return True
    is_ours = isinstance(error, FlatFSDPError)
    return isinstance(error, RuntimeError) and not is_ours and "gloo" in str(error).lower()


def print_immediately(sentence: str) -> None:
    """Print `sentence` at once, whatever the main thread is doing."""
    with contextlib.suppress(OSError, ValueError):
        print(sentence, file=sys.stderr, flush=True)


def end_process_unless(come_back: Callable[[], bool]) -> None:
    """End this process with status 1 if `come_back()` does not turn true within `GRACE` seconds (on the thread)."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        if come_back():
            return
        time.sleep(0.05)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(1)


def current_watch() -> Watchdog:
    """The watch of the default process group."""
    return for_group(dist.group.WORLD, "watch", _new_watch)


def _new_watch() -> Watchdog:
    world, store, rank = dist.group.WORLD, StoreClient(), dist.get_rank()
    made = Watchdog(store, rank=rank, world=dist.get_world_size(), time_limit=_torch.time_limit(world))
    at_end(functools.partial(_publish_exit_record, weakref.ref(made), store, rank))
    _torch.when_destroyed(world, functools.partial(_close, weakref.ref(made)))
    return made


def _publish_exit_record(
    watch: weakref.ref[Watchdog], store: StoreClient, rank: int, error: BaseException | None
) -> None:
    """The process ends: tell the others, also those who look for this rank after it destroyed its process group."""
    found = watch()
    last = found.last_step() if found is not None else ""
    words = f"{QUIETLY}{last}" if error is None else f"ended with {in_words(error)}{last}"
    cause = str(error) if isinstance(error, AgreementError) else None
    if store.silent_for() > 1.0:  # this process would not come to its end
        return
    with contextlib.suppress(RuntimeError):
        ExitRecord(rank, words, cause).publish(store, alarm=error is not None)


def _close(watch: weakref.ref[Watchdog]) -> None:
    found = watch()
    if found is not None:
        found.close()


def expecting(ranks: Sequence[int], what: str) -> contextlib.AbstractContextManager[None]:
    """The enclosed code waits for `ranks`: say so in words if they are waiting elsewhere.

    `what` completes "rank 0 ...". Process groups that move nothing wait for nobody.
    """
    if len(ranks) == 1 or "fake" in str(dist.get_backend_config()):
        return contextlib.nullcontext()
    return current_watch().waiting(ranks, what)


def fail_together(what: str) -> contextlib.AbstractContextManager[Callable[[BaseException], None]]:
    """A context for what all ranks run: an exception on one of them, which leaves it, reaches those that wait for it.

    For programs that catch exceptions and live on, a notebook say; of one that ends a process the others hear anyway.
    The rank that fails raises what it has. Another one, if it is inside, too, and has been waiting for some seconds in
    a collective (of a model, or of the program's in `collective_region`), prints an `AgreementError` with that rank and
    its exception, and raises it from the next step of its model. Where nothing wakes it, its process ends. Ranks that
    all fail, in whatever way, raise each their own.

    Enter it equally often on all ranks. Nothing is communicated unless one fails.

    Args:
        what: a name for it, the same on all ranks; completes "rank 0 failed in ...".

    Returns:
        What `with ... as tell` gives: `tell(error)` tells of an exception that is still to be raised.

    Example:
        >>> import flatfsdp
        >>> with flatfsdp.fail_together("the evaluation"):
        ...     pass  # forwards, and what is made of their outputs
    """
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    if alone or "fake" in str(dist.get_backend_config()):
        return contextlib.nullcontext(lambda error: None)
    return current_watch().fail_together(what)


@contextlib.contextmanager
def collective_region() -> Iterator[None]:
    """The enclosed code waits for other ranks, in a collective of the program's own.

    Reports tell such a rank from one that computes (see `set_collective_timeout`), and a connection that breaks is
    explained. Not collective, and quick enough for every step.

    Raises:
        LostRankError: in place of the backend's error, where a connection broke: which rank ended, and with what, as
            far as that is known.

    Example:
        >>> import flatfsdp, torch
        >>> tokens = torch.tensor(512)
        >>> with flatfsdp.collective_region():
        ...     torch.distributed.all_reduce(tokens)
    """
    try:
        with waits.blocked(theirs=True):
            yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise current_watch().explain(error) from error
