"""The order of the operations that models do together with other ranks, agreed on while they run.

[Note: agreement] The *log* consists of all operations of units that involve other ranks, as ops: a forward begins, a
unit is entered, a forward ends, a backward begins (with the plan of its collectives), an iteration is abandoned. It
must be the same on all ranks. If a rank has no expectation, as in the first iteration, ops are compared in an exchange
of fixed size. Later every rank compares its next op with its expectation ([Note: predicted order]), and continues at no
cost if they are equal. Otherwise it leaves a note in the store and waits for those of the others: if all are equal that
is a new order, otherwise an error. Ranks whose ops were expected are notified by their watchdog ([Note: watch]), which
answers for the main thread while that waits in a collective. Models that share a communicator share the log ([Note:
several models]).

[Note: deleted models] A rank continues without a note if its op was expected; if another rank's op was not, its watch
leaves the note later. The log outlives its models: the watch keeps it, and also answers when a model is deleted, until
the process group is destroyed. Then it leaves only what ranks may still ask that have not erred: that this one has
computed all gradients of its last backward ([Note: unused]).
"""

from __future__ import annotations

import functools
import json
import math
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...errors import AgreementError, FlatFSDPError, LostRankError, logger, ranks_by_value
from ..base.events import EventLog
from ..base.foreign_text import parse
from ..base.hashing import hash63
from ..base.peers import Issued
from ..base.wait_limits import blocked_since, unfinished_since
from ..comm.comm_stats import CommStats
from ..watchdog.process_exit import end_process_unless, print_immediately
from ..watchdog.status_report import ExitRecord, Progress, in_one_sentence
from ..watchdog.store import StoreClient
from ..watchdog.watchdog import PATIENCE, is_lost_connection
from . import ops
from .collective_calls import DIFFERENT, READING, SAME, come, erase, texts_at
from .divergence import ModelNames, divergence
from .ops import LoggedOp, Op
from .rank_exchange import RankExchange
from .sequence_predictor import SequencePredictor
from .unused_params import UnusedParams, answer, left_at

REMEMBERED = 1024  # the last ops, which can still be reported to other ranks


@functools.cache
def salt(number: int) -> int:
    """What tells ops of this model in a log apart from the same ones of others there."""
    return hash63(f"model {number}") if number > 0 else 0


class _Known(NamedTuple):
    """What a log keeps of a model, which may be deleted."""

    model: weakref.ref[OpSequence]
    scope: str
    name: str
    progress: Progress
    answered: set[int]


class OpLog:
    """One rank's side of a log, which outlives its models. [Note: agreement]

    Attributes:
        scope: its name in the store, the same on all ranks.
        position: the number of ops so far.
        predictor: of the next one.
        entries: the last ones, as (place, op, step, number of the model).
        issued: what backwards have issued.
        abandoned: the op with which the last iteration was abandoned here, until ranks have met there.
        has_failed: whether ranks have diverged: the next model begins another log.
        places: the last places at which this rank left a note for the others.
    """

    def __init__(self, scope: str = "", rank: int = 0, ranks: Sequence[int] = (), store: StoreClient | None = None):
        self.scope = scope
        self.position = 0
        self.predictor = SequencePredictor()
        self.entries: deque[tuple[int, Op, int, int]] = deque(maxlen=REMEMBERED)  # made into `LoggedOp` when read
        self.issued = Issued()
        self.abandoned: LoggedOp | None = None
        self.has_failed = False
        self.places: deque[int] = deque(maxlen=64)
        self._rank, self._ranks, self._store = rank, tuple(ranks), store
        self._models: list[_Known] = []
        self._waits_at: int | None = None  # where the main thread waits for the others
        self._settled: list[int] = []  # the last places where all ranks have met, which some may not have left

    @classmethod
    def of(cls, peers: RankExchange) -> OpLog:
        """A new log of the ranks that have answered, named after the first model."""
        return cls(peers.scope, peers.rank, peers.ranks, peers.store)

    def join(self, model: OpSequence, name: str) -> int:
        """Add a model, on all ranks; returns its number here."""
        known = _Known(weakref.ref(model), model.peers.scope, name, model.progress, model.unused.answered)
        self._models.append(known)
        return len(self._models) - 1

    @property
    def living(self) -> list[OpSequence]:
        """The models that exist."""
        return [model for each in self._models if (model := each.model()) is not None]

    def has(self, op: Op, *, number: int, step: int, completes: bool = False) -> None:
        """A model has done `op` next."""
        self.predictor.learn(op.code ^ salt(number), completes=completes)
        self.entries.append((self.position, op, step, number))
        self.position += 1

    # -- ranks meet in the store, when an op was not expected --------------------------------------------------------

    def announce(self, at: int, op: Op, model: OpSequence, *, number: int, issued: int | None = None) -> None:
        """Leave a note of this rank's `op`, which others may not expect, and raise an alarm.

        `issued`: the number of collectives that `model` had issued, if it will issue no more: a rank that has issued
        more waits in vain. None if it continues.
        """
        self.places.append(at)
        model.noted = op.words
        if self._leave_note(at, op, number) == 1:
            self.store.raise_alarm(json.dumps([self.scope, at, issued, number]))

    def _leave_note(self, at: int, op: Op, number: int) -> int:
        """Write the note of this rank's `op` at `at`, and the verdict if that decides it; returns what `come` does."""
        self.store.post(f"{self._place(at)}/note/{self._rank}", self._text(op, number))
        return come(self.store, self._place(at), str(op.code ^ salt(number)), len(self._ranks))

    def _text(self, op: Op, number: int) -> str:
        model = self._models[number].model()
        name = op.model or (self._models[number].name if len(self._models) > 1 else "")
        return op.to_text(model.required if model is not None else (), name)

    def meet(self, at: int, model: OpSequence) -> None:
        """Wait for the notes of all ranks at `at`; raises unless all are the same."""
        peers, place, step = model.peers, self._place(at), max(1, model.progress.steps)
        self._waits_at = at
        assert peers.watch is not None
        what = f"{model.noted}, which was not expected, and waits for the other ranks to answer, in step {step}"
        with peers.watch.waiting(self._ranks, what, ends_by_notes=True):
            verdict = self.store.wait(lambda: peers.verdict or self.store.read(f"{place}/verdict"), PATIENCE)
        peers.raise_verdict()
        if verdict != SAME:
            self._fail_with(self.judge(at, model, model.progress.steps), model)
        self._waits_at = None
        if self._rank == self._ranks[0]:
            # All ranks have a note here, so all have left earlier places: the notes there can be erased.
            while self._settled:
                erase(self.store, self._place(self._settled.pop()), self._ranks)
            self._settled.append(at)

    def require_same(self, codes: dict[int, int], op: Op, model: OpSequence) -> None:
        """Fail unless the `codes` of all ranks, which were exchanged, are equal."""
        if len(set(codes.values())) > 1:
            # One place for all models: others may have come to the exchange with another one.
            texts = model.peers.publish(self._text(op, model.number), codes, place=self._place(self.position))
            self._fail_with(_error(texts, model.progress.steps, model.names), model)

    def judge(self, at: int, model: OpSequence, step: int) -> AgreementError:
        """The error with the ops of all ranks at `at`, from their notes, or with the ranks that have ended."""
        place, absent = self._place(at), Op(-1, "has not reached this point").to_text()
        texts = ranks_by_value(texts_at(self.store, place, self._ranks, absent))
        exits = ExitRecord.read_all(self.store).values()
        ended = [each for each in exits if each.rank in self._ranks and each.cause is None]
        self.store.let_all_read(place, len(self._ranks), READING)
        if ended:
            assert model.peers.watch is not None
            return LostRankError(in_one_sentence(ended, model.peers.watch.progress_with_living(), rank=self._rank))
        return _error({tuple(ranks): text for text, ranks in texts.items()}, step, model.names)

    def fail(self, error: AgreementError) -> None:
        """Ranks have diverged: so has every model here, whose collectives are matched with those of the others."""
        if not self.has_failed:
            self.has_failed = True
            for each in self.living:
                each.peers.give_up(error, None)
                for log in each.logs:
                    log.fail(error)

    def _fail_with(self, error: AgreementError, model: OpSequence) -> None:
        self.fail(error)
        model.peers.fail_with(error)

    def _place(self, at: int) -> str:
        return f"{self.scope}/{at}"

    # -- for the watchdog, from its thread ---------------------------------------------------------------------------

    @property
    def store(self) -> StoreClient:
        """The store of the notes. Precondition: there is another rank."""
        assert self._store is not None
        return self._store

    def consider(self, alarm: str) -> bool:
        """Process the alarm of a rank, without waiting; returns True if it is settled or does not concern this log."""
        match parse(alarm):
            case ["unused", str(scope), int(at)]:
                return all([self._answer(each, at) for each in self._models if each.scope == scope])
            case [str(scope), int(at), int() | None as issued, int(number)]:
                pass
            case _:
                return True
        if scope != self.scope or self.has_failed or self._waits_at == at or not 0 <= number < len(self._models):
            return True
        passed = self.position > at  # read before `places`: the main thread adds a place there before it meets
        model = self._models[number].model()
        if at in self.places:
            if self.abandoned is None or at != self.abandoned.at:
                return True
        elif passed:
            quoted = self._logged_at(at)
            self._leave_note(at, *(quoted or (Op(-1, "passed this point long ago"), 0))[:2])
        elif model is None:
            self._leave_note(at, Op(-1, "deleted its model"), number)
        elif issued is not None and at == self.position and model.issued > issued:
            self._leave_note(at, Op(-1, f"went on in {model.part}"), number)
        if self.store.read(f"{self._place(at)}/verdict") != DIFFERENT:
            return False
        living = self.living
        if living:
            model = model or living[0]
            quoted = self._logged_at(at)
            error = self.judge(at, model, quoted[2] if quoted is not None else model.progress.steps)
            if not self.has_failed:
                print_immediately(f"[flatfsdp, rank {self._rank}] {type(error).__name__}: {error}")
                self.fail(error)
                end_process_unless(lambda: any(e.peers.was_raised for e in living) or not any(e.busy for e in living))
        return True

    def _answer(self, known: _Known, at: int) -> bool:
        """Answer a rank that lacks gradients of a model in the backward that has ended at this place."""
        if (model := known.model()) is not None:
            return model.unused.consider(known.scope, at, self.position)
        if at < self.position and at not in known.answered:
            known.answered.add(at)
            answer(self.store, known.scope, at, self._rank, 0, self.position)
        return True

    def _logged_at(self, at: int) -> tuple[Op, int, int] | None:
        """The op at this place, the number of its model, and its step."""
        return next(((op, number, step) for place, op, step, number in list(self.entries) if place == at), None)

    def publish(self) -> None:
        """The watch ends: leave the place that this rank has reached."""
        for each in self._models:
            if each.progress.backwards:
                self.store.post(left_at(each.scope, self._rank), str(self.position))


def _error(texts: Mapping[tuple[int, ...], str], step: int, names: ModelNames) -> AgreementError:
    return AgreementError(divergence({ranks: Op.of(text) for ranks, text in sorted(texts.items())}, step, names))


class OpSequence:
    """What one model does of the log, and the part of an iteration that it is in. [Note: agreement]

    Attributes:
        peers: the other ranks.
        log: which it writes to; turns: another one that gets its turns. [Note: several models]
        number: of the model in its log.
        names: the names of the model's units and parameters in messages.
        required: whether each parameter required a gradient in the last forward.
        noted: the description of this rank's op in its last note.
        busy: whether this rank is inside an iteration, where it may wait for others.
        part: the part of the iteration that runs, in words; None between iterations.
        unused: the agreement on parameters without gradients on any rank.
        progress: the number of steps and backwards so far.
    """

    def __init__(self, peers: RankExchange) -> None:
        self.busy = False
        self.part: str | None = None
        self._refused = ""  # the error, in words, with which this rank ended a part that autograd runs
        self._last = ""  # the part that ran last
        self._since = time.monotonic()  # when this rank began its current part, or ended the last one
        self._issued_before = 0
        self._comm_stats = CommStats()
        self._events = EventLog()
        self.names, self.required, self.noted = ModelNames(), tuple[bool, ...](), ""
        self.unused = UnusedParams(peers)
        self.peers = peers
        self.progress = Progress()
        self.turns: OpLog | None = None
        self.begin(OpLog(), "")

    def follow(self, comm_stats: CommStats, events: EventLog) -> None:
        """Set the objects in which the model counts its collectives and records its events."""
        self._comm_stats, self._events = comm_stats, events

    def begin(self, log: OpLog, name: str) -> None:
        """Write to `log` from now on, on all ranks, and let the watchdog answer there. `name`: the model's."""
        self.log, self.number = log, log.join(self, name)
        self._salt = salt(self.number)
        if self.peers.watch is not None:
            self.peers.watch.add(self, log)
            self.peers.watch.follow(self.peers.scope, self.progress)

    @property
    def logs(self) -> list[OpLog]:
        """The logs that it writes to."""
        return [self.log] if self.turns is None else [self.log, self.turns]

    @property
    def position(self) -> int:
        """The number of ops in the log so far."""
        return self.log.position

    # -- the parts of an iteration -----------------------------------------------------------------------------------

    def start(self, part: str) -> None:
        """Begin a part of an iteration."""
        self.part, self._since, self._refused = part, time.monotonic(), ""
        self._issued_before = self._comm_stats.issued

    def refuse(self, error: BaseException) -> None:
        """Record an `error` of flatfsdp in a backward, to report it to other ranks: autograd does not pass it on."""
        if isinstance(error, FlatFSDPError):
            self._refused = f" after {type(error).__name__}: {error}"

    def rest(self) -> None:
        """Return to the state between iterations, in which this rank does not wait for others."""
        self._last, self._since = self.part or self._last, time.monotonic()
        self.part = None
        self.busy = False

    @property
    def issued(self) -> int:
        """The number of collectives issued in this part."""
        return self._comm_stats.issued - self._issued_before

    # -- ops ---------------------------------------------------------------------------------------------------------

    def next(
        self, op: Op, *, unit: int | None = None, opens: bool = False, completes: bool = False, ends: bool = False
    ) -> None:
        """Do `op` next. Collective if there is no expectation.

        `unit`: the op enters this unit of a forward. `opens`: a step begins. `completes`: an iteration may end here.
        `ends`: so does the running part, after this op.

        Raises:
            AgreementError: the op of another rank differs; on every rank, within seconds.
        """
        peers, log = self.peers, self.log
        if peers.verdict is not None:
            peers.raise_verdict()
        if log.abandoned is not None:  # by another model
            self.meet_abandoned()
        code = op.code ^ self._salt
        expected = log.predictor.expected()
        if expected != code:
            self._compare(op, expected)
        log.predictor.learn(code, unit=unit and unit ^ self._salt, completes=completes)
        log.entries.append((log.position, op, self.progress.steps, self.number))
        self.progress.steps += opens
        if ends:  # before the watch sees the position, and compares with a rank that may be in the next part already
            self._issued_before = self._comm_stats.issued
        log.position += 1

    def end_backward(self, op: Op, lacking: int) -> int:
        """Do `op` next, the last one of a backward in which this rank is `lacking` gradients of some parameters, a bit
        each; returns those that all ranks lack. Collective if there is no expectation, or if ranks reduce a bitmap.

        Raises:
            AgreementError: the op of another rank differs; on every rank, within seconds.
        """
        peers, unused, log = self.peers, self.unused, self.log
        if peers.verdict is not None:
            peers.raise_verdict()
        if log.abandoned is not None:
            self.meet_abandoned()
        at, expected = log.position, log.predictor.expected()
        if expected != op.code ^ self._salt:
            answers = self._compare(op, expected, int(lacking > 0))
            unused.compares = unused.compares or any(lacks for _, lacks in answers.values())
        compares = unused.compares and peers.watch is not None
        if lacking and not compares and peers.watch is not None:
            unused.reserve(at)
        # The part ends, and with it the count for comparison, before the watch sees the position.
        self._issued_before = self._comm_stats.issued + (len(peers.axes) if compares else 0)
        self._did(op, completes=True)
        if peers.watch is None:
            return lacking
        if compares:
            return unused.lacked_by_all(lacking)
        return unused.ask(at, lacking) if lacking else 0

    def _compare(self, op: Op, expected: int | None, extra: int = 0) -> Mapping[int, list[int]]:
        """Compare `op`, which is not `expected`, with the next ones of all ranks. Collective if nothing is expected:
        then the result is each rank's code and `extra`."""
        if expected is None:
            answers = self.peers.exchange(op.code ^ self._salt, extra)
            if answers is not None:
                self.require_same(answers, op)
                return answers
        elif self.peers.watch is not None:
            self._meet(op)
        return {}

    def _meet(self, op: Op, *, issued: int | None = None) -> None:
        """Announce `op`, which was not expected, and wait for the next ones of all ranks."""
        self.log.announce(self.log.position, op, self, number=self.number, issued=issued)
        self.log.meet(self.log.position, self)

    def require_same(self, answers: Mapping[int, list[int]], op: Op) -> None:
        """Fail unless the codes in the `answers` of all ranks are equal; `op` is that of this rank."""
        self.log.require_same({rank: code for rank, (code, _) in answers.items()}, op, self)

    def show(self, op: Op, *, issued: int | None = None) -> None:
        """Do `op`, which other ranks may not do: if it was not expected all ranks meet. Not collective.

        `issued`: the number of collectives that this rank had issued, if it will issue no more and the part ends.
        """
        if self.log.abandoned is not None:
            self.meet_abandoned()
        if self.log.predictor.expected() != op.code ^ self._salt:
            self._meet(op, issued=issued)
        if issued is not None:
            self._issued_before = self._comm_stats.issued
        self._did(op, completes=True)

    def _did(self, op: Op, *, completes: bool = False) -> None:
        self.log.has(op, number=self.number, step=self.progress.steps, completes=completes)

    def take_turn(self, op: Op) -> None:
        """Do `op`, whose code tells the model, next in the log of turns; not collective if it was expected."""
        self.peers.raise_verdict()
        log = self.turns
        assert log is not None
        if log.predictor.expected() != op.code:
            log.announce(log.position, op, self, number=0)
            log.meet(log.position, self)
        log.has(op, number=0, step=self.progress.steps)

    # -- abandoned iterations ----------------------------------------------------------------------------------------

    def meet_abandoned(self) -> None:
        """If the last iteration was abandoned here, wait until all ranks have abandoned it at the same place."""
        log = self.log
        if log.abandoned is not None:
            at, op, number = log.abandoned
            log.meet(at, self)
            log.abandoned = None
            log.predictor.forget_present()
            log.has(op, number=number, step=self.progress.steps)

    def publish_abandoned(self, error: BaseException | None) -> None:
        """Notify the others that an exception ended the iteration here, without waiting for them or raising.

        Whether all ranks abandoned it at the same place is checked when the next forward begins.
        """
        part, peers, log = self.part, self.peers, self.log
        if part is None or peers.watch is None or peers.verdict is not None:
            return
        if log.abandoned is not None:  # before, for example by a failed backward inside of a forward
            return
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return
        issued = self.issued
        because = f" after {type(error).__name__}: {error}" if error is not None else self._refused
        op = ops.abandoned(issued, part, because)
        log.abandoned = LoggedOp(log.position, op, self.number)
        try:
            log.announce(log.position, op, self, number=self.number, issued=issued)
        except RuntimeError as lost:  # the store is gone; the current exception matters more
            logger.debug("could not notify the other ranks that an iteration was abandoned: %s", lost)

    def explain(self, error: BaseException) -> None:
        """Raise the `AgreementError` behind `error`, if it is a failure of the communication."""
        peers = self.peers
        if peers.watch is None or isinstance(error, FlatFSDPError):
            return
        if peers.verdict is None and is_lost_connection(error):
            # The note with the reason may arrive later.
            found = peers.watch.explain(error, lambda: peers.verdict)
            if peers.verdict is None:
                peers.verdict = found
        peers.raise_verdict(error)

    # -- for the watchdog, from its thread ---------------------------------------------------------------------------

    @property
    def time_limit(self) -> float:
        """The timeout of the model's process groups, in seconds."""
        return self.peers.time_limit

    @property
    def doing(self) -> tuple[str, float]:
        """The activity of this rank with the model, in words that follow "rank 0: ", and the time at which it began."""
        part, since, when = self.part, self._since, f"in step {max(1, self.progress.steps)}"
        if part is None:
            left = f"since {self._last} {when}" if self._last else "before the model's first step"
            unfinished = "" if math.isinf(unfinished_since()) else "; its device has not finished a collective"
            return f"in the program's own code {left}{unfinished}", since
        if math.isinf(blocked_since()):
            return f"computing in {part}, {when}", since
        last = "; ".join(map(str, self._events.tail(2)))
        return f"waiting in {part}, {when}{f' (last: {last})' if last else ''}", since

    @property
    def last_step(self) -> str:
        """The last part of this rank with the model, in words that follow a sentence; "" if it did not run yet."""
        last = self.part or self._last
        return f", after {last} in step {max(1, self.progress.steps)}" if last else ""

    def fail(self, error: AgreementError, ranks: Sequence[int] | None) -> bool:
        """Set the verdict to `error` if this model needs one of `ranks` (None: any other); returns whether it does."""
        return self.peers.give_up(error, ranks)
