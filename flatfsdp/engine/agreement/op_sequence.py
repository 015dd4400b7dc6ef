"""The order of the operations that a model does together with other ranks, agreed on while it runs.

[Note: agreement] The *sequence* of a model consists of all operations of its units that involve other ranks, as ops: a
forward begins, a unit is entered, a forward ends, a backward begins (with the plan of its collectives), an iteration is
abandoned. It must be the same on all ranks. If a rank has no expectation, as in the first iteration, ops are compared
in an exchange of fixed size. Later every rank compares its next op with its expectation ([Note: predicted order]), and
continues at no cost if they are equal. Otherwise it leaves a note in the store and waits for those of the others: if
all are equal that is a new order, otherwise an error. Ranks whose ops were expected are notified by their watchdog
([Note: watch]), which answers for the main thread while that waits in a collective.

[Note: deleted models] A rank continues without a note if its op was expected; if another rank's op was not, its watch
leaves the note later ([Note: agreement]). The watch outlives the model, and so do the last ops, which it keeps: it also
answers when the model is deleted, until the process group is destroyed.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence

from ...errors import AgreementError, FlatFSDPError, LostRankError, logger, ranks_by_value
from ..base.events import EventLog
from ..base.foreign_text import parse
from ..base.wait_limits import blocked_since, unfinished_since
from ..comm.comm_stats import CommStats
from ..watchdog.process_exit import end_process_unless, print_immediately
from ..watchdog.status_report import ExitRecord, Progress, in_one_sentence
from ..watchdog.watchdog import PATIENCE, is_lost_connection
from . import ops
from .collective_calls import DIFFERENT, READING, SAME, come, erase, texts_at
from .divergence import ModelNames, divergence
from .ops import LoggedOp, Op
from .rank_exchange import RankExchange
from .sequence_predictor import SequencePredictor

THE_FORWARD, A_FORWARD_AGAIN = "the forward of unit", "a forward, after a backward inside of it"
A_BACKWARD = "a backward"  # activities of an iteration

REMEMBERED = 1024  # the last ops, which can still be reported to other ranks


class Meetings:
    """One rank's side of the meetings of one model: in the store, when a rank's next op was not expected.

    Attributes:
        names: the names of the model's units and parameters in messages.
        required: whether each parameter required a gradient in the last forward.
        noted_at: the last positions in the sequence at which this rank left a note for the others.
        waits_at: the position at which the main thread waits for the others; None if it does not.
    """

    def __init__(self, peers: RankExchange) -> None:
        self.names = ModelNames()
        self.required: tuple[bool, ...] = ()
        self.noted_at: deque[int] = deque(maxlen=64)
        self.waits_at: int | None = None
        self._peers = peers
        self._noted = ""  # the description of this rank's op in its last note
        self._settled: list[int] = []  # the last positions at which all ranks have met, which some may not have left

    def require_same(self, codes: dict[int, int], op: Op, step: int) -> None:
        """Fail unless the `codes` of all ranks, which were exchanged, are equal."""
        if len(set(codes.values())) > 1:
            texts = self._peers.publish(op.to_text(self.required), codes)
            self._peers.fail_with(AgreementError(self._words(texts, step)))

    def announce(self, at: int, op: Op, *, issued: int | None = None) -> None:
        """Leave a note of this rank's `op`, which others may not expect, and raise an alarm.

        `issued`: the number of collectives that it had issued, if it will issue no more: a rank that has issued more
        waits in vain. None if it continues.
        """
        self.noted_at.append(at)
        self._noted = op.words
        self.leave_note(at, op, alarm=json.dumps([self._peers.scope, at, issued]))

    def leave_note(self, at: int, op: Op, *, alarm: str | None = None) -> None:
        """Write the note of this rank's `op` at `at`, and the verdict if that decides it. `alarm`: raised if it is the
        first note."""
        notes, prefix = self._peers.store, self._prefix(at)
        notes.post(f"{prefix}/note/{self._peers.rank}", op.to_text(self.required))
        here = come(notes, prefix, str(op.code), len(self._peers.ranks))
        if here == 1 and alarm is not None:
            notes.raise_alarm(alarm)

    def meet(self, at: int, step: int) -> None:
        """Wait for the notes of all ranks at `at`; raises unless all are the same."""
        peers, prefix = self._peers, self._prefix(at)
        notes = peers.store
        self.waits_at = at

        assert peers.watch is not None
        what = f"{self._noted}, which was not expected, and waits for the other ranks to answer, in step {max(1, step)}"
        with peers.watch.waiting(peers.ranks, what, ends_by_notes=True):
            verdict = notes.wait(lambda: peers.verdict or notes.read(f"{prefix}/verdict"), PATIENCE)
        peers.raise_verdict()
        if verdict != SAME:
            peers.fail_with(self.judge(at, step))
        self.waits_at = None
        if peers.rank == peers.ranks[0]:
            # All ranks have a note here, so all have left earlier positions: the notes there can be erased.
            while self._settled:
                erase(notes, self._prefix(self._settled.pop()), peers.ranks)
            self._settled.append(at)

    def judge(self, at: int, step: int) -> AgreementError:
        """The error with the ops of all ranks at `at`, from their notes, or with the ranks that have ended."""
        peers, prefix = self._peers, self._prefix(at)
        texts = ranks_by_value(
            texts_at(peers.store, prefix, peers.ranks, Op(-1, "has not reached this point").to_text())
        )
        exits = ExitRecord.read_all(peers.store).values()
        ended = [each for each in exits if each.rank in peers.ranks and each.cause is None]
        peers.store.let_all_read(prefix, len(peers.ranks), READING)
        if ended:
            assert peers.watch is not None
            return LostRankError(in_one_sentence(ended, peers.watch.progress_with_living(), rank=peers.rank))
        return AgreementError(self._words({tuple(ranks): text for text, ranks in texts.items()}, step))

    def is_different(self, at: int) -> bool:
        """Whether the notes at `at` are known to differ."""
        return self._peers.store.read(f"{self._prefix(at)}/verdict") == DIFFERENT

    def _prefix(self, at: int) -> str:
        return f"{self._peers.scope}/{at}"

    def _words(self, texts: dict[tuple[int, ...], str], step: int) -> str:
        return divergence({ranks: Op.of(text) for ranks, text in sorted(texts.items())}, step, self.names)


class OpSequence:
    """One rank's side of the sequence of one model. [Note: agreement]

    Attributes:
        busy: whether this rank is inside an iteration, where it may wait for others.
        activity: what this rank does in its iteration, in words; None between iterations.
        meetings: the meetings of ranks whose ops were not expected.
        position: the number of ops so far.
        progress: the number of steps and backwards so far.
        abandoned: the op with which the last iteration was abandoned here, until ranks have met there.
    """

    def __init__(self, peers: RankExchange) -> None:
        self.busy = False
        self.activity: str | None = None
        self._refused = ""  # the error, in words, with which this rank ended an activity that autograd runs
        self._last = ""  # the activity that ran last
        self._since = time.monotonic()  # when this rank began its current activity, or ended the last one
        self._issued_before = 0
        self._comm_stats = CommStats()
        self._events = EventLog()
        self.meetings = Meetings(peers)
        self.position = 0
        self._peers = peers
        self._predictor = SequencePredictor()
        self._logged: deque[tuple[int, Op, int]] = deque(maxlen=REMEMBERED)  # converted to `LoggedOp` when read
        self.progress = Progress()
        self.abandoned: LoggedOp | None = None

    def follow(self, comm_stats: CommStats, events: EventLog) -> None:
        """Set the objects in which the model counts its collectives and records its events."""
        self._comm_stats, self._events = comm_stats, events

    def connect(self) -> None:
        """Let the watchdog answer for this rank, after all ranks have answered."""
        peers = self._peers
        assert peers.watch is not None
        peers.watch.add(self, PastOps(peers, self._logged, self.meetings.noted_at).consider)
        peers.watch.follow(peers.scope, self.progress)

    # -- activities of an iteration ------------------------------------------------------------------------------------

    def start(self, activity: str) -> None:
        """Begin an activity of an iteration."""
        self.activity, self._since, self._refused = activity, time.monotonic(), ""
        self._issued_before = self._comm_stats.issued

    def refuse(self, error: BaseException) -> None:
        """Record an `error` of flatfsdp in a backward, to report it to other ranks: autograd does not pass it on."""
        if isinstance(error, FlatFSDPError):
            self._refused = f" after {type(error).__name__}: {error}"

    def rest(self) -> None:
        """Return to the state between iterations, in which this rank does not wait for others."""
        self._last, self._since = self.activity or self._last, time.monotonic()
        self.activity = None
        self.busy = False

    @property
    def in_forward(self) -> bool:
        """Whether this rank is inside of a forward."""
        activity = self.activity
        return activity is not None and self.abandoned is None and activity.startswith((THE_FORWARD, A_FORWARD_AGAIN))

    @property
    def in_backward(self) -> bool:
        """Whether this rank is inside of a backward."""
        return self.activity == A_BACKWARD and self.abandoned is None

    @property
    def issued(self) -> int:
        """The number of collectives issued in this activity."""
        return self._comm_stats.issued - self._issued_before

    # -- ops ---------------------------------------------------------------------------------------------------------

    def next(
        self,
        op: Op,
        *,
        unit: int | None = None,
        opens: bool = False,
        completes: bool = False,
        ends: bool = False,
        then: int = 0,
    ) -> None:
        """Do `op` next. Collective if there is no expectation.

        `unit`: the op enters this unit of a forward. `opens`: a step begins. `completes`: an iteration may end here.
        `ends`: so does the running activity, after this op, and `then` so many collectives.

        Raises:
            AgreementError: the op of another rank differs; on every rank, within seconds.
        """
        peers = self._peers
        if peers.verdict is not None:
            peers.raise_verdict()
        expected = self._predictor.expected()
        if expected != op.code:
            self._compare(op, expected)
        self._predictor.learn(op.code, unit=unit, completes=completes)
        self._logged.append((self.position, op, self.progress.steps))
        self.progress.steps += opens
        if ends:  # before the watch sees the position, and compares with a rank that may be ahead already
            self._issued_before = self._comm_stats.issued + then
        self.position += 1

    def _compare(self, op: Op, expected: int | None) -> None:
        """Compare `op`, which is not `expected`, with the next ones of all ranks. Collective if nothing is expected."""
        peers = self._peers
        if expected is None:
            answers = peers.exchange(op.code)
            if answers is not None:
                self.require_same(answers, op)
        elif peers.watch is not None:
            self.meetings.announce(self.position, op)
            self.meetings.meet(self.position, self.progress.steps)

    def require_same(self, answers: Mapping[int, list[int]], op: Op) -> None:
        """Fail unless the codes in the `answers` of all ranks are equal; `op` is that of this rank."""
        self.meetings.require_same({rank: code for rank, (code, _) in answers.items()}, op, self.progress.steps)

    def show(self, op: Op, *, issued: int | None = None) -> None:
        """Do `op`, which other ranks may not do: if it was not expected all ranks meet. Not collective.

        `issued`: the number of collectives that this rank had issued, if it will issue no more and the activity ends.
        """
        if self._predictor.expected() != op.code:
            self.meetings.announce(self.position, op, issued=issued)
            self.meetings.meet(self.position, self.progress.steps)
        if issued is not None:
            self._issued_before = self._comm_stats.issued
        self._follow(op, completes=True)

    def _follow(self, op: Op, *, completes: bool = False) -> None:
        self._predictor.learn(op.code, completes=completes)
        self._logged.append((self.position, op, self.progress.steps))
        self.position += 1

    def _logged_at(self, at: int) -> LoggedOp | None:
        return next((each for each in itertools.starmap(LoggedOp, list(self._logged)) if each.at == at), None)

    # -- abandoned iterations ----------------------------------------------------------------------------------------

    def meet_abandoned(self) -> None:
        """If the last iteration was abandoned here, wait until all ranks have abandoned it at the same position."""
        if self.abandoned is not None:
            at, op = self.abandoned.at, self.abandoned.op
            self.meetings.meet(at, self.progress.steps)
            self.abandoned = None
            self._predictor.forget_present()
            self._follow(op)

    def publish_abandoned(self, error: BaseException | None) -> None:
        """Notify the others that an exception ended the iteration here, without waiting for them or raising.

        Whether all ranks abandoned it at the same position is checked when the next forward begins.
        """
        activity, peers = self.activity, self._peers
        if activity is None or peers.watch is None or peers.verdict is not None:
            return
        if self.abandoned is not None:  # before, for example by a failed backward inside of a forward
            return
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return
        issued = self.issued
        because = f" after {type(error).__name__}: {error}" if error is not None else self._refused
        op = ops.abandoned(issued, activity, because)
        self.abandoned = LoggedOp(self.position, op, self.progress.steps)
        try:
            self.meetings.announce(self.position, op, issued=issued)
        except RuntimeError as lost:  # the store is gone; the current exception matters more
            logger.debug("could not notify the other ranks that an iteration was abandoned: %s", lost)

    def explain(self, error: BaseException) -> None:
        """Raise the `AgreementError` behind `error`, if it is a failure of the communication."""
        peers = self._peers
        if peers.watch is None or isinstance(error, FlatFSDPError):
            return
        if peers.verdict is None and is_lost_connection(error):
            # The note with the reason may arrive later.
            found = peers.watch.explain(error, lambda: peers.verdict)
            if peers.verdict is None:
                peers.decide(found)
        peers.raise_verdict(error)

    # -- for the watchdog, from its thread ---------------------------------------------------------------------------

    @property
    def time_limit(self) -> float:
        """The timeout of the model's process groups, in seconds."""
        return self._peers.time_limit

    @property
    def may_wait(self) -> bool:
        """Whether the main thread may wait for others in an iteration."""
        return self.busy

    @property
    def doing(self) -> tuple[str, float]:
        """The activity of this rank with the model, in words that follow "rank 0: ", and the time at which it began."""
        activity, since, when = self.activity, self._since, f"in step {max(1, self.progress.steps)}"
        if activity is None:
            left = f"since {self._last} {when}" if self._last else "before the model's first step"
            unfinished = "" if math.isinf(unfinished_since()) else "; its device has not finished a collective"
            return f"in the program's own code {left}{unfinished}", since
        if math.isinf(blocked_since()):
            return f"computing in {activity}, {when}", since
        last = "; ".join(map(str, self._events.tail(2)))
        return f"waiting in {activity}, {when}{f' (last: {last})' if last else ''}", since

    @property
    def last_step(self) -> str:
        """The last activity of this rank with the model, in words that follow a sentence; "" if it did not run yet."""
        last = self.activity or self._last
        return f", after {last} in step {max(1, self.progress.steps)}" if last else ""

    def fail(self, error: AgreementError, ranks: Sequence[int] | None) -> bool:
        """Set the verdict to `error` if this model needs one of `ranks` (None: any other); returns whether it does."""
        return self._peers.give_up(error, ranks)

    def consider(self, alarm: str) -> bool:
        """Process the alarm of a rank, without waiting; returns True if it is settled or does not concern this rank."""
        peers, meetings = self._peers, self.meetings
        match parse(alarm):
            case [str(scope), int(at), int() | None as issued]:
                pass
            case _:
                return True
        if scope != peers.scope or peers.verdict is not None or meetings.waits_at == at:
            return True
        passed = self.position > at  # read before `noted_at`: the main thread adds a position there before it meets
        if at in meetings.noted_at:
            if self.abandoned is None or at != self.abandoned.at:
                return True
        elif passed:
            quoted = self._logged_at(at)
            meetings.leave_note(at, quoted.op if quoted is not None else Op(-1, "passed this point long ago"))
        elif issued is not None and at == self.position and self.issued > issued:
            meetings.leave_note(at, Op(-1, f"went on in {self.activity}"))
        if not meetings.is_different(at):
            return False
        quoted = self._logged_at(at)
        error = meetings.judge(at, quoted.step if quoted is not None else self.progress.steps)
        if peers.verdict is None:
            print_immediately(f"[flatfsdp, rank {peers.rank}] {type(error).__name__}: {error}")
            self.fail(error, None)
            end_process_unless(lambda: peers.was_raised or not self.may_wait)
        return True


class PastOps:
    """The last ops of one rank with one model, which it does not reference."""

    def __init__(self, peers: RankExchange, logged: deque[tuple[int, Op, int]], noted_at: deque[int]) -> None:
        """`logged`: (position, op, step) of each; `noted_at`: where this rank left a note."""
        self._rank, self._ranks, self._scope, self._store = peers.rank, peers.ranks, peers.scope, peers.store
        self._logged, self._noted_at = logged, noted_at

    def consider(self, alarm: str) -> bool:
        """Answer the alarm of a rank, if it concerns this model, which was deleted."""
        match parse(alarm):
            case [str(scope), int(at), _] if scope == self._scope and at not in self._noted_at:
                self._noted_at.append(at)
                op, prefix = self._op_at(at), f"{scope}/{at}"
                self._store.post(f"{prefix}/note/{self._rank}", op.to_text())
                come(self._store, prefix, str(op.code), len(self._ranks))
        return True

    def _op_at(self, at: int) -> Op:
        """The op at position `at`, or what this rank did instead."""
        for position, op, _ in self._logged:
            if position == at:
                return op
        passed = "passed this point long ago and " if self._logged and self._logged[-1][0] >= at else ""
        return Op(-1, f"{passed}deleted its model")
