"""The order of what a model does together with other ranks, agreed while it happens.

[Note: agreement] The *sequence* of a model is what its units do that involves other ranks, as ops: a forward begins, a
unit is entered, a forward ends, a backward begins (with the plan of its collectives), an iteration is abandoned. It
must be the same on all ranks. Ops that nothing lets a rank expect are compared in an exchange of fixed size; that is
the first iteration. After it every rank compares its next op with what it expects ([Note: predicted order]) and goes on
at no cost where they are equal. A rank that does something else leaves a note in the store and waits for those of the
others: if all are the same it is a new order, else an error. Ranks that did as expected learn of it from their watchdog
([Note: watch]), which answers for the main thread while that waits in a collective.
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
from ..base.wait_limits import blocked_since
from ..comm.comm_stats import CommStats
from ..watchdog.process_exit import end_process_unless, print_immediately
from ..watchdog.status_report import ExitRecord, in_one_sentence
from ..watchdog.watchdog import PATIENCE, is_lost_connection
from . import ops
from .collective_calls import DIFFERENT, READING, SAME, come, erase, texts_at
from .divergence import ModelNames, divergence
from .ops import LoggedOp, Op
from .rank_exchange import RankExchange
from .sequence_predictor import SequencePredictor
from .unused_params import UnusedParams

REMEMBERED = 1024  # ops that can still be quoted to other ranks


class Meetings:
    """One rank's side of the meetings of one model: in the store, where a rank did not expect what it is about to do.

    Attributes:
        names: what messages call the model's units and parameters.
        required: which parameters required gradients in the last forward.
        places: the last places in the sequence at which this rank left a note for the others.
        waits_at: the place where the main thread waits for the others; None where it does not.
    """

    def __init__(self, peers: RankExchange) -> None:
        self.names = ModelNames()
        self.required: tuple[bool, ...] = ()
        self.places: deque[int] = deque(maxlen=64)
        self.waits_at: int | None = None
        self._peers = peers
        self._noted = ""  # what this rank did where it waits
        self._settled: int | None = None  # the last place that all ranks have left behind

    def require_same(self, codes: dict[int, int], op: Op, step: int) -> None:
        """All ranks have exchanged the codes of their ops: fail unless they are equal."""
        if len(set(codes.values())) > 1:
            texts = self._peers.publish(op.to_text(self.required), codes)
            self._peers.fail_with(AgreementError(self._words(texts, step)))

    def announce(self, at: int, op: Op, *, issued: int | None = None) -> None:
        """Leave a note of this rank's `op`, which others may not expect, and alarm them.

        `issued`: how many collectives it had issued where it will issue no more: a rank that has issued more waits in
        vain. None where it goes on.
        """
        self.places.append(at)
        self._noted = op.words
        self.leave_note(at, op, alarm=json.dumps([self._peers.scope, at, issued]))

    def leave_note(self, at: int, op: Op, *, alarm: str | None = None) -> None:
        """Write what this rank does at `at`, and the verdict if that decides it. `alarm`: for others if it is the
        first note."""
        notes, place = self._peers.store, self._place(at)
        notes.post(f"{place}/note/{self._peers.rank}", op.to_text(self.required))
        here = come(notes, place, str(op.code), len(self._peers.ranks))
        if here == 1 and alarm is not None:
            notes.raise_alarm(alarm)

    def meet(self, at: int, step: int) -> None:
        """Wait for the notes of all ranks at `at`; an error unless all are the same."""
        peers, place = self._peers, self._place(at)
        notes = peers.store
        self.waits_at = at

        def decided() -> object:
            return peers.verdict or notes.read(f"{place}/verdict")

        assert peers.watch is not None
        what = f"{self._noted}, unexpectedly, and waits for the notes of the others, in step {max(1, step)}"
        with peers.watch.waiting(peers.ranks, what, ends_by_notes=True):
            verdict = notes.wait(decided, PATIENCE)
        peers.raise_verdict()
        if verdict != SAME:
            peers.fail_with(self.judge(at, step))
        self.waits_at = None
        if peers.rank == peers.ranks[0]:
            # Whoever has a note here has left all earlier places: the notes there can go.
            if self._settled is not None:
                erase(notes, self._place(self._settled), peers.ranks)
            self._settled = at

    def judge(self, at: int, step: int) -> AgreementError:
        """What the ranks did at `at`, from everybody's note, or who of them has ended meanwhile."""
        peers, place = self._peers, self._place(at)
        texts = ranks_by_value(texts_at(peers.store, place, peers.ranks, Op(-1, "has not come that far").to_text()))
        exits = ExitRecord.read_all(peers.store).values()
        ended = [each for each in exits if each.rank in peers.ranks and each.cause is None]
        peers.store.let_all_read(place, len(peers.ranks), READING)
        if ended:
            return LostRankError(in_one_sentence(ended))
        return AgreementError(self._words({tuple(ranks): text for text, ranks in texts.items()}, step))

    def is_different(self, at: int) -> bool:
        """Whether the notes at `at` are known to differ."""
        return self._peers.store.read(f"{self._place(at)}/verdict") == DIFFERENT

    def _place(self, at: int) -> str:
        return f"{self._peers.scope}/{at}"

    def _words(self, texts: dict[tuple[int, ...], str], step: int) -> str:
        return divergence({ranks: Op.of(text) for ranks, text in sorted(texts.items())}, step, self.names)


class OpSequence:
    """One rank's side of the sequence of one model. [Note: agreement]

    Attributes:
        busy: whether this rank is inside an iteration, where it may wait for others.
        part: the part of it that runs, in words; None between iterations.
        meetings: where ranks meet that did not expect each other's ops.
        unused: which parameters no rank brings gradients to.
        position: ops so far.
        abandoned: how the last iteration was abandoned here, if the others have not been met since.
    """

    def __init__(self, peers: RankExchange) -> None:
        self.busy = False
        self.part: str | None = None
        self._refused = ""  # why a part that autograd runs cannot go on, as this rank has reported it
        self._last = ""  # the part that ran last
        self._since = time.monotonic()  # when this rank began what it does, or came back from it
        self._issued_before = 0
        self._comm_stats = CommStats()
        self._events = EventLog()
        self.meetings = Meetings(peers)
        self.unused = UnusedParams(peers)
        self.position = 0
        self._peers = peers
        self._predictor = SequencePredictor()
        self._logged: deque[tuple[int, Op, int]] = deque(maxlen=REMEMBERED)  # made `LoggedOp` when somebody looks
        self._step = 0
        self.abandoned: LoggedOp | None = None

    def follow(self, comm_stats: CommStats, events: EventLog) -> None:
        """The model counts its collectives and records its events here."""
        self._comm_stats, self._events = comm_stats, events

    def connect(self) -> None:
        """All ranks have answered: let the watchdog answer for this one."""
        peers = self._peers
        assert peers.watch is not None
        self.unused.answers.connect(peers.rank, peers.scope, peers.store)
        peers.watch.add(self, self.unused.answers.publish_what_is_left)

    # -- the parts of an iteration -----------------------------------------------------------------------------------

    def start(self, part: str) -> None:
        """This part begins."""
        self.part, self._since, self._refused = part, time.monotonic(), ""
        self._issued_before = self._comm_stats.issued

    def refuse(self, error: BaseException) -> None:
        """`error` was raised inside a backward, from which autograd brings none: if it is ours others shall read it."""
        if isinstance(error, FlatFSDPError):
            self._refused = f" after {type(error).__name__}: {error}"

    def rest(self) -> None:
        """Back to between iterations, where this rank waits for nobody."""
        self._last, self._since = self.part or self._last, time.monotonic()
        self.part = None
        self.busy = False

    @property
    def issued(self) -> int:
        """How many collectives were issued in this part."""
        return self._comm_stats.issued - self._issued_before

    # -- ops ---------------------------------------------------------------------------------------------------------

    def next(self, op: Op, *, unit: int | None = None, opens: bool = False, completes: bool = False) -> None:
        """This rank does `op`. Collective where nothing let the ranks expect it.

        `unit`: it enters this unit of a forward. `opens`: a step begins. `completes`: an iteration may end here.

        Raises:
            AgreementError: on every rank, within seconds where others do something else.
        """
        peers = self._peers
        if peers.verdict is not None:
            peers.raise_verdict()
        expected = self._predictor.expected()
        if expected != op.code:
            if expected is None:
                answers = peers.exchange(op.code)
                if answers is not None:
                    self.require_same(answers, op)
            elif peers.watch is not None:
                self.meetings.announce(self.position, op)
                self.meetings.meet(self.position, self._step)
        self._predictor.learn(op.code, unit=unit, completes=completes)
        self._logged.append((self.position, op, self._step))
        self._step += opens
        self.position += 1

    def require_same(self, answers: Mapping[int, list[int]], op: Op) -> None:
        """All ranks have exchanged the codes of what they do, this one of `op`: fail unless they are equal."""
        self.meetings.require_same({rank: code for rank, (code, _) in answers.items()}, op, self._step)

    def show(self, op: Op, *, issued: int | None = None) -> None:
        """This rank does `op`, of which others may not know: all meet where it was not expected. No collective.

        `issued`: how many collectives it had issued where it will issue no more.
        """
        if self._predictor.expected() != op.code:
            self.meetings.announce(self.position, op, issued=issued)
            self.meetings.meet(self.position, self._step)
        self._follow(op, completes=True)

    def expects(self, *among: Op) -> bool:
        """Whether one of these is expected to be the next."""
        expected = self._predictor.expected()
        return any(expected == op.code for op in among)

    def _follow(self, op: Op, *, completes: bool = False) -> None:
        self._predictor.learn(op.code, completes=completes)
        self._logged.append((self.position, op, self._step))
        self.position += 1

    def _logged_at(self, at: int) -> LoggedOp | None:
        return next((each for each in itertools.starmap(LoggedOp, list(self._logged)) if each.at == at), None)

    # -- abandoned iterations ----------------------------------------------------------------------------------------

    def meet_abandoned(self) -> None:
        """If the last iteration was abandoned here, wait until all ranks have abandoned it at the same place."""
        if self.abandoned is not None:
            at, op = self.abandoned.at, self.abandoned.op
            self.meetings.meet(at, self._step)
            self.abandoned = None
            self._predictor.forget_present()
            self.unused.forget()
            self._follow(op)

    def publish_abandoned(self, error: BaseException | None) -> None:
        """An iteration ends here by an exception: let the others know, without waiting for them or raising.

        Whether all ranks abandoned it at the same place shows when the next forward begins.
        """
        part, peers = self.part, self._peers
        if part is None or peers.watch is None or peers.verdict is not None:
            return
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return
        issued = self.issued
        because = f" after {type(error).__name__}: {error}" if error is not None else self._refused
        op = ops.abandoned(issued, part, because)
        self.abandoned = LoggedOp(self.position, op, self._step)
        try:
            self.meetings.announce(self.position, op, issued=issued)
        except RuntimeError as lost:  # the store is gone; the exception under way matters more
            logger.debug("could not notify the other ranks that an iteration was abandoned: %s", lost)

    def explain(self, error: BaseException) -> None:
        """Raise the `AgreementError` behind `error`, if it is a failure of the communication."""
        peers = self._peers
        if peers.watch is None or isinstance(error, FlatFSDPError):
            return
        if peers.verdict is None and is_lost_connection(error):
            # The reason may still be on its way.
            found = peers.watch.explain(error, lambda: peers.verdict)
            peers.verdict = peers.verdict or found
        peers.raise_verdict(error)

    # -- for the watchdog, from its thread ---------------------------------------------------------------------------

    @property
    def time_limit(self) -> float:
        """Seconds that the model's process groups give an operation."""
        return self._peers.time_limit

    @property
    def doing(self) -> tuple[str, float]:
        """What this rank does with the model, to follow "rank 0: ", and since when."""
        part, since, when = self.part, self._since, f"in step {max(1, self._step)}"
        if part is None:
            left = f"since {self._last} {when}" if self._last else "before the model's first step"
            return f"in the program's own code {left}", since
        if math.isinf(blocked_since()):
            return f"computing in {part}, {when}", since
        last = "; ".join(map(str, self._events.tail(2)))
        return f"waiting in {part}, {when}{f' (last: {last})' if last else ''}", since

    @property
    def last_step(self) -> str:
        """What this rank did last with the model, to follow a sentence; "" if it did not run yet."""
        last = self.part or self._last
        return f", after {last} in step {max(1, self._step)}" if last else ""

    def fail(self, error: AgreementError, ranks: Sequence[int] | None) -> bool:
        """Go on with nothing that needs one of `ranks` (None: any other), because of `error`; whether that is so."""
        return self._peers.give_up(error, ranks)

    def consider(self, alarm: str) -> bool:
        """Judge the alarm of a rank, by the reading of the store at most; True when it is settled or does not concern
        this one."""
        peers, meetings = self._peers, self.meetings
        match parse(alarm):
            case ["unused", str(scope), int(at), bool(calls)]:
                self.unused.answers.consider(scope, at, calls)
                return True
            case [str(scope), int(at), int() | None as issued]:
                pass
            case _:
                return True
        if scope != peers.scope or peers.verdict is not None or meetings.waits_at == at:
            return True
        passed = self.position > at  # read before the places: whoever meets adds its place first
        if at in meetings.places:
            if self.abandoned is None or self.abandoned.at != at:
                return True
        elif passed:
            quoted = self._logged_at(at)
            meetings.leave_note(at, quoted.op if quoted is not None else Op(-1, "went on long ago"))
        elif issued is not None and self.position == at and self.issued > issued:
            meetings.leave_note(at, Op(-1, f"went on in {self.part}"))
        if not meetings.is_different(at):
            return False
        quoted = self._logged_at(at)
        error = meetings.judge(at, quoted.step if quoted is not None else self._step)
        if peers.verdict is None:
            print_immediately(f"[flatfsdp, rank {peers.rank}] {type(error).__name__}: {error}")
            peers.verdict = error
            end_process_unless(lambda: peers.was_raised or not self.busy)
        return True
