"""The order of what a model does together with other ranks, agreed while it happens.

[Note: agreement] The *stream* of a model is what its units do that involves other ranks, as a sequence of symbols: a
forward begins, a unit is entered, a forward ends, a backward begins (with the plan of its collectives), an iteration is
abandoned. It must be the same on all ranks. Symbols that nothing lets a rank expect are compared in an exchange of
fixed size; that is the first iteration. After it every rank compares its next symbol with what it expects
([Note: habit]) and goes on at no cost where they are equal. A rank that does something else leaves a note in the store
and waits for those of the others: if all say the same it is a new order, else an error. Ranks that did as expected
learn of it from their watch ([Note: watch]), which speaks for the main thread while that waits in a collective.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
import string
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import AgreementError, FlatFSDPError, LostRankError, few, logger, ranks_in_words
from ..base.events import EventLog
from ..base.foreign_text import one_line, parse
from ..base.hashing import hash63
from ..base.wait_limits import blocked_since
from ..comm.transport import CommStats
from ..watchdog import store as board
from ..watchdog.status_report import ExitRecord, in_one_sentence
from ..watchdog.watchdog import PATIENCE, end_process_unless, is_lost_connection, print_immediately
from .conditions import StepConditions, autocast_on, differences
from .rank_exchange import RankExchange
from .sequence_predictor import SequencePredictor
from .unused_params import UnusedParams

if TYPE_CHECKING:
    from ..runtime.model import Root
    from ..runtime.unit import Unit
    from ..runtime.unit_data import UnitData

Flags = tuple[tuple[bool, ...], ...]  # of the leaves of a unit, by handle
TRAINING, EVALUATION = "a training", "an evaluation"  # kinds of forward, with and without gradients
SAME, DIFFERENT = "same", "different"  # what a meeting of notes ends with
REMEMBERED = 1024  # symbols that the watch can still quote
PLANS = 64  # of backwards, whose symbols are known


class Op(NamedTuple):
    """One step of the stream: a number that is equal on all ranks, and its words.

    `ran`, `trained`: of a backward, which parameters of the model are of units that ran in its forwards, and which it
    is to bring gradients; of a training forward all, and which require gradients. One bit each, as numbers in base 16.
    `conditions`: those of a forward or a backward. [Note: conditions]
    `unreached`: of a backward, which parameters are of units that ran, and whose outputs needed no gradient; as a note,
    those among them that required one themselves.
    """

    code: int
    words: str
    ran: str = ""
    trained: str = ""
    conditions: StepConditions = StepConditions()
    unreached: str = ""

    def to_text(self) -> str:
        """What others read of it."""
        return json.dumps(self[1:])

    @classmethod
    def of(cls, text: str) -> Op:
        """What a rank wrote; words only where that is no symbol. [Note: trust]"""
        match parse(text):
            case [
                str(words),
                str(ran),
                str(trained),
                [bool(stepped), bool(loaded), str(autocast)],
                str(unreached),
            ] if set(ran + trained + unreached) <= set(string.hexdigits):
                return cls(-1, words, ran, trained, StepConditions(stepped, loaded, autocast), unreached)
        return cls(-1, one_line(text))


class LoggedOp(NamedTuple):
    """A symbol, its place in the stream, and how many iterations had begun before it."""

    at: int
    symbol: Op
    step: int


_CAME = Op(hash63("came"), "computed gradients of parameters in its backward")
_NONE_CAME = Op(hash63("none came"), "ended a backward that computed no gradient of a parameter")
# Where ranks differ in nothing but which units a forward runs.
_IN_FORWARD = operator.methodcaller("startswith", ("entered unit ", "ended its forward"))
_REMEDY = ", except in what is given to ensure_unit_participation()"
_ISSUED = "gathered in its backward the units"
_MIXED = (
    "Values of different units were exchanged for each other, so what this backward brought is wrong: go on from the "
    "checkpoint before. Where ranks use different parts of a model, checkpoint activations of each of their units by "
    "itself, not of several together or one inside another; otherwise please report this"
)
_ENDED = {kind: Op(hash63(f"ended {kind}"), "ended its forward") for kind in (TRAINING, EVALUATION)}


class OpSequence(RankExchange):
    """One rank's side of the stream of one model. [Note: agreement]"""

    def __init__(self) -> None:
        super().__init__()
        self._sharded = False
        self._comm_stats = CommStats()
        self._entries: dict[int, Op] = {}  # by id of the unit
        self._forwards: dict[int, str] = {}  # what runs, in words
        self._positions: dict[int, int] = {}
        self._numbers: dict[int, range] = {}  # of a unit's parameters among those of the model
        self._names: Callable[[], Iterable[str]] = tuple  # of these parameters
        self._backwards: dict[tuple[Any, ...], Op] = {}  # by plan
        self._issues: dict[tuple[UnitData | None, ...], Op] = {}  # what they issued, by units
        # What is expected, what came, and how far it has come.
        self._predictor = SequencePredictor()
        self._logged: deque[tuple[int, Op, int]] = deque(maxlen=REMEMBERED)  # made `LoggedOp` when somebody looks
        self._position = 0
        self._step = 0
        self._kind = ""  # of the running forward
        self._opening: str | None = None  # the kind of forward that the next unit begins
        self.stepped = self.loaded = False  # since a step began with it; noted where it happens
        self._autocast = ""  # of the last forward; where nothing is sharded, of the last training forward
        self._flags: tuple[bool, ...] = ()  # which parameters required gradients in it
        self._doing: str | None = None  # which part of the stream runs, None between iterations
        self._issued_before = 0
        # For the watch of this rank, and through it for the others.
        self._events = EventLog()
        self._left = ""  # which part of the stream ran last
        self._turned = time.monotonic()  # when this rank began what it does, or came back from it
        # Meetings: places at which this rank left a note itself, and the last one that all left behind.
        self._met: deque[int] = deque(maxlen=64)
        self._meeting: int | None = None  # the place where the main thread waits for the others
        self._noted = ""  # what it did there
        self._settled: int | None = None
        self._abandoned: LoggedOp | None = None
        self._refused = ""  # why a part that autograd runs cannot go on, as that was said on this rank
        self.unused = UnusedParams()
        self.silent = False  # forwards communicate nothing: ranks may differ in them

    def _flow(self, root: Root) -> None:
        """The stream of `root` begins: number its units."""
        self._sharded = any(unit.groups.shard.size > 1 for unit in root.units)
        self._comm_stats, self._events = root.comm_stats, root.events
        self._names = _names_in(weakref.ref(root))
        start = 0
        for index, unit in enumerate(root.units):
            self._numbers[id(unit)] = range(start, start + sum(len(handle.leaves) for handle in unit.handles))
            start = self._numbers[id(unit)].stop
            self._entries[id(unit)] = Op(hash63(f"unit {index}"), f"entered unit {unit.label}")
            self._forwards[id(unit)] = f"the forward of unit {unit.label}"
            self._positions[id(unit)] = index

    def begin_forward(self, root: Root, *, training: bool) -> None:
        """An outermost forward begins. If the last iteration was abandoned, wait for the others to say the same."""
        if not self._axes or self.silent:
            return
        self.busy = True
        self._kind = self._opening = TRAINING if training else EVALUATION
        if training or self._sharded:
            self._autocast = autocast_on(root.device.device.type)
            self._flags = root.trained() if training else ()
        self._meet_abandoned()
        if self._sharded:
            self._start("the beginning of a forward")

    def _meet_abandoned(self) -> None:
        """If the last iteration was abandoned here, wait for the others to say the same."""
        if self._abandoned is not None:
            at, symbol = self._abandoned.at, self._abandoned.symbol
            self._meet(at)
            self._abandoned = None
            self._predictor.forget_present()
            self.unused.forget()
            self._follow(symbol)

    def check_order(self, unit: Unit, *, schedule: str) -> None:
        """`unit` is about to be gathered: is it the one that all ranks gather? Collective in the first iteration.

        `schedule`: what users set, in words. Where no unit is sharded a forward communicates nothing, and ranks may
        differ in it.

        Raises:
            AgreementError: on every rank, within seconds.
        """
        if not self._sharded or self.silent:
            return
        symbol = self._entries[id(unit)]
        if self._opening is not None:
            opening = _opening(self._opening, symbol.code, unit.label, schedule, self._conditions(), self._flags)
            self._opening = None
            self._start(self._forwards[id(unit)])
            self._next(opening, unit=symbol.code, opens=True)
        else:
            self._doing = self._forwards[id(unit)]
            self._next(symbol, unit=symbol.code)

    def check_request(self, unit: Unit, method: str) -> None:
        """A user asks for `unit` to be gathered or freed by this `method`. Collective in the first iteration.

        Raises:
            AgreementError: on every rank, within seconds.
        """
        if not self._sharded or self.silent:
            return
        symbol = Op(hash63(f"{method} {self._positions[id(unit)]}"), f"called {method}() of unit {unit.label}")
        if self._doing is not None:
            self._next(symbol, unit=symbol.code)
        else:
            with self.waiting(f"{method}() of unit {unit.label}"):
                self._meet_abandoned()
                self._next(symbol)

    @contextmanager
    def collective_call(self, call: str, units: Sequence[Unit] = (), *, always: bool = False) -> Iterator[None]:
        """A `call` of the user's, between iterations, which all ranks make for the same `units`: is it so? Inside, this
        rank may wait for them. Where no unit is sharded only an `always` call communicates.

        Raises:
            AgreementError: on every rank, within seconds where the others do something else.
        """
        if self._doing is not None or not (self._sharded or (always and self._axes)):
            yield
            return
        with self.waiting(call):
            self._meet_abandoned()
            self._next(self._called(call, units))
            yield

    def _called(self, call: str, units: Sequence[Unit]) -> Op:
        if not units or len(units) == len(self._positions):
            return Op(hash63(call), f"called {call}")
        others = f" and {len(units) - 1} inside" if len(units) > 1 else ""
        positions = [self._positions[id(unit)] for unit in units]
        return Op(hash63(f"{call} {positions}"), f"called {call} of unit {units[0].label}{others}")

    def ask(self, what: str, mine: int) -> dict[int, int]:
        """Every rank's number, as all ranks ask for `what` between iterations. Collective over all axes: 24 bytes of
        each rank.

        Raises:
            AgreementError: on every rank, within seconds where the others do something else.
        """
        answers = None
        if self._axes:
            with self.waiting(what):
                self._meet_abandoned()
                self._next(Op(hash63(what), f"asked for {what}"))
                answers = self._exchange(mine)
        return {self._rank: mine} if answers is None else {rank: code for rank, (code, _) in answers.items()}

    def leave(self, loop: str, error: BaseException | None) -> None:
        """This rank leaves a `loop` in which others may go on to ask: do they leave, too? With an `error` that shows
        when the next forward begins.

        Raises:
            AgreementError: without an `error`; on every rank, within seconds.
        """
        if not self._axes:
            return
        with self.waiting(loop):
            if error is None:
                self._meet_abandoned()
                self._next(Op(hash63(f"left {loop}"), f"left {loop}"))
            elif self._abandoned is None:
                self.publish_abandoned(error)

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Inside, this rank may wait for others, in an iteration or between them."""
        if self._doing is not None or not self._axes:
            yield
            return
        self.busy = True
        self._start(doing)
        try:
            yield
        except RuntimeError as error:
            self.explain(error)
            raise
        finally:
            self.rest()

    def end_forward(self) -> None:
        """The outermost forward has ended."""
        if self._doing is not None:
            self._next(_ENDED[self._kind], completes=self._kind != TRAINING)
        self.rest()

    def check_backward(self, root: Root, trained: Mapping[Unit, Flags], *, reduces: bool) -> None:
        """A backward begins: will all ranks issue the same collectives in it, and bring gradients to the same
        parameters? Collective in the first iteration.

        `trained`: of units that can get gradients, which of their leaves require one. `reduces`: whether there is a
        unit that reduces them.

        Raises:
            AgreementError: on every rank, within seconds.
        """
        if not self._axes:
            return
        record = root.record
        nearby = tuple(
            position
            for position, unit in enumerate(root.units)
            if unit.post_forward_gather and unit.has_post_forward_shards
        )
        reduced = tuple(trained), tuple(trained.values())
        begun_with = None if self._sharded else (self._conditions(), self._flags)
        plan = root.sync, record.entered, record.anchored, reduced, nearby, root.schedule_description, begun_with
        symbol = self._backwards.get(plan)
        if symbol is None:
            if len(self._backwards) == PLANS:  # of a model whose order is another at every step
                self._backwards.clear()
            symbol = self._backwards[plan] = self._symbol_of(*plan)
        self.busy = True
        self._meet_abandoned()
        self._start("a backward")
        self._next(symbol, opens=not self._sharded, completes=not reduces)
        if reduces:
            self.unused.begin(self._position, symbol.code)

    def check_issued(self, gathered: Sequence[UnitData], reduced: Sequence[UnitData]) -> None:
        """A backward that reduces has issued its collectives, those of these units: are they the same on all ranks?
        Collective in the first iteration.

        Raises:
            AgreementError: on every rank, within seconds.
        """
        if not self._axes:
            return
        issued = (*gathered, None, *reduced)
        symbol = self._issues.get(issued)
        if symbol is None:
            positions = [unit and self._positions[id(unit)] for unit in issued]
            reported = [", ".join(unit.label for unit in units) or "none" for units in (gathered, reduced)]
            words = f"{_ISSUED} {reported[0]}, and reduced {reported[1]}"
            symbol = _remember(self._issues, issued, Op(hash63(f"issued {positions}"), words))
        self._next(symbol, completes=True)

    def _symbol_of(
        self,
        sync: bool,
        entered: Sequence[Unit],
        anchored: Sequence[Unit],
        reduced: tuple[Sequence[Unit], Sequence[Flags]],
        nearby: Sequence[int],
        schedule: str,
        begun_with: tuple[StepConditions, tuple[bool, ...]] | None,
    ) -> Op:
        positions = self._positions
        began, ended = ([positions[id(unit)] for unit in units] for units in (entered, anchored))
        found = dict(zip(*reduced, strict=True))
        flats = [
            (positions[id(unit)], kind) for unit, flags in found.items() for kind, each in enumerate(flags) if any(each)
        ]
        trained = self._bits_of(found)
        conditions = StepConditions()
        if begun_with is not None:
            conditions, flags = begun_with
            trained = f"{int(trained, 16) & _bits(flags):x}"  # what was frozen in the forward gets no gradient, either
        how = "" if sync else " under no_sync()"
        words = f"began a backward{how} through {len(ended)} units, {len(flats)} flat gradients{_with(schedule)}"
        if nearby:
            words += f"; {len(nearby)} units kept nearby"
        ran, unreached = (
            f"{sum(1 << position for unit in units for position in self._numbers[id(unit)]):x}"
            for units in (set(entered), set(entered).difference(anchored))
        )
        code = hash63(f"{sync} {began} {ended} {flats} {list(nearby)} {schedule} {trained} {conditions}")
        return Op(code, words, ran, trained, conditions, unreached)

    def _as_note(self, symbol: Op) -> str:
        """What others read of a step of this rank's."""
        if symbol.unreached:
            symbol = symbol._replace(unreached=f"{int(symbol.unreached, 16) & _bits(self._flags):x}")
        return symbol.to_text()

    def _conditions(self) -> StepConditions:
        """Those with which a step begins, and the next one has its own."""
        found = StepConditions(self.stepped, self.loaded, self._autocast)
        self.stepped = self.loaded = False
        return found

    def _bits_of(self, trained: Mapping[Unit, Flags]) -> str:
        numbers = (
            zip(self._numbers[id(unit)], itertools.chain(*flags), strict=True) for unit, flags in trained.items()
        )
        return f"{sum(flag << position for position, flag in itertools.chain.from_iterable(numbers)):x}"

    def check_gradients(self, *, came: bool) -> None:
        """The first gradient of a parameter came in a backward that communicates, or it ended and none `came`.

        Where none comes a rank gathers and reduces no more (`torch.autograd.grad` brings none), so all must be alike.
        That none comes is the rare case and part of the stream; that some come is only where the other was expected. No
        collective.

        Raises:
            AgreementError: on every rank, within seconds.
        """
        if self._watch is None:
            return
        self._raise_verdict()
        expected = self._predictor.expected()
        if not came:
            self._show(_NONE_CAME, issued=self._issued())
        elif expected in (_CAME.code, _NONE_CAME.code):
            self._show(_CAME, issued=None)

    def check_gathered(self, gathered: Sequence[UnitData]) -> None:
        """A backward ended in which no gradient of a parameter came, and these units were gathered: the same on all
        ranks? No collective, as some may wait for a gather.

        Raises:
            AgreementError: on every rank, within seconds.
        """
        if self._watch is None:
            return
        self._raise_verdict()
        issued = (*gathered, None, None)
        symbol = self._issues.get(issued)
        if symbol is None:
            units = ", ".join(unit.label for unit in gathered) or "no unit"
            code = hash63(f"gathered {[self._positions[id(unit)] for unit in gathered]}")
            symbol = _remember(self._issues, issued, Op(code, f"{_NONE_CAME.words}, and gathered {units}"))
        self._show(symbol, issued=self._issued())

    def _show(self, symbol: Op, *, issued: int | None) -> None:
        """A step of which others may not know: seen by all where it was not expected."""
        if self._predictor.expected() != symbol.code:
            self._met.append(self._position)
            self._leave_note(self._position, symbol, issued=issued, alarm=True)
            self._meet(self._position)
        self._follow(symbol, completes=True)

    def rest(self) -> None:
        """Back to between iterations, where this rank waits for nobody."""
        self._left, self._turned = self._doing or self._left, time.monotonic()
        self._doing = None
        self.busy = False

    def abandon(self, error: BaseException | None) -> None:
        """`error` ended a forward: tell the others, or raise the disagreement that it stems from."""
        if error is not None:
            self.explain(error)
        self.publish_abandoned(error)

    def publish_abandoned(self, error: BaseException | None) -> None:
        """An iteration ends here by an exception: tell the others, without waiting for them or raising.

        Whether all ranks abandoned it at the same place shows when the next forward begins.
        """
        doing, self._opening = self._doing, None
        if doing is None or self._watch is None or self._verdict is not None:
            return
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return
        issued = self._issued()
        because = f" after {type(error).__name__}: {error}" if error is not None else self._refused
        symbol = Op(hash63(f"abandoned {issued}"), f"abandoned its iteration in {doing}{because}")
        self._abandoned = LoggedOp(self._position, symbol, self._step)
        self._met.append(self._position)
        try:
            self._leave_note(self._position, symbol, issued=issued, alarm=True)
        except RuntimeError as lost:  # the store is gone; the exception under way matters more
            logger.debug("could not tell the other ranks that an iteration was abandoned: %s", lost)

    def refuse(self, error: BaseException) -> None:
        """`error` was raised inside a backward, from which autograd brings none: if it is ours others shall hear it."""
        if isinstance(error, FlatFSDPError):
            self._refused = f" after {type(error).__name__}: {error}"

    def explain(self, error: BaseException) -> None:
        """Raise the `AgreementError` behind `error`, if it is a failure of the communication."""
        if self._watch is None or isinstance(error, FlatFSDPError):
            return
        if self._verdict is None and is_lost_connection(error):
            # The reason may still be on its way.
            found = self._watch.explain(error, lambda: self._verdict)
            self._verdict = self._verdict or found
        self._raise_verdict(error)

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank. Collective over all axes."""
        answers = self._exchange(int(flag)) if self._axes else None
        return flag if answers is None else any(code for code, _ in answers.values())

    def _start(self, doing: str) -> None:
        self._doing, self._turned, self._refused = doing, time.monotonic(), ""
        self._issued_before = self._comm_stats.issued

    def _issued(self) -> int:
        return self._comm_stats.issued - self._issued_before

    def _next(self, symbol: Op, *, unit: int | None = None, opens: bool = False, completes: bool = False) -> None:
        if self._verdict is not None:
            self._raise_verdict()
        expected = self._predictor.expected()
        if expected != symbol.code:
            if expected is None:
                self._agree_by_exchange(symbol)
            elif self._watch is not None:
                self._met.append(self._position)
                self._leave_note(self._position, symbol, alarm=True)
                self._meet(self._position)
        self._follow(symbol, unit=unit, opens=opens, completes=completes)

    def _follow(self, symbol: Op, *, unit: int | None = None, opens: bool = False, completes: bool = False) -> None:
        self._predictor.learn(symbol.code, unit=unit, completes=completes)
        self._logged.append((self._position, symbol, self._step))
        self._step += opens
        self._position += 1

    def _logged_at(self, at: int) -> LoggedOp | None:
        return next((said for said in itertools.starmap(LoggedOp, list(self._logged)) if said.at == at), None)

    # -- meetings ----------------------------------------------------------------------------------------------------

    def _agree_by_exchange(self, symbol: Op) -> None:
        answers = self._exchange(symbol.code)
        if answers is not None:
            self._require_same({rank: answer[0] for rank, answer in answers.items()}, symbol)

    def _require_same(self, codes: dict[int, int], symbol: Op) -> None:
        if len(set(codes.values())) > 1:
            self._fail(AgreementError(self._divergence(self._publish(self._as_note(symbol), codes), self._step)))

    def _leave_note(self, at: int, symbol: Op, *, alarm: bool, issued: int | None = None) -> None:
        """Say what this rank does at `at`, and the verdict if that decides it.

        `issued`: how many collectives it had issued when it abandoned its iteration, None if it did not. It will issue
        no more, so a rank that has issued more waits in vain.
        """
        notes, position = self._store, f"{self._scope}/{at}"
        if alarm:
            self._noted = symbol.words
        notes.post(f"{position}/says/{self._rank}", self._as_note(symbol))
        if notes.set_if_absent(f"{position}/first", str(symbol.code)) != str(symbol.code):
            notes.post(f"{position}/verdict", DIFFERENT)
            return
        count = notes.count(f"{position}/notes")
        if count == len(self.ranks):
            notes.post(f"{position}/verdict", SAME)
        elif count == 1 and alarm:
            notes.raise_alarm(json.dumps([self._scope, at, issued]))

    def _meet(self, at: int) -> None:
        """Wait for the notes of all ranks at `at`; an error unless all are the same."""
        notes, position = self._store, f"{self._scope}/{at}"
        self._meeting = at

        def decided() -> object:
            return self._verdict or notes.read(f"{position}/verdict")

        assert self._watch is not None
        what = f"{self._noted}, unexpectedly, and waits for word of the others, in step {max(1, self._step)}"
        with self._watch.waiting(self.ranks, what, settled_by_notes=True):
            verdict = notes.wait(decided, PATIENCE)
        self._raise_verdict()
        if verdict != SAME:
            self._fail(self._judge(at, self._step))
        self._meeting = None
        if self._rank == self.ranks[0]:
            # Whoever has a note here has left all earlier places: the notes there can go.
            if self._settled is not None:
                old = f"{self._scope}/{self._settled}"
                notes.erase(f"{old}/first", f"{old}/notes", f"{old}/verdict")
                notes.erase(*(f"{old}/says/{rank}" for rank in self.ranks))
            self._settled = at

    def _judge(self, at: int, step: int) -> AgreementError:
        """What the ranks did at `at`, from everybody's note, or who of them has ended meanwhile."""
        notes, position = self._store, f"{self._scope}/{at}"
        said: dict[int, str] = {}

        def all_there() -> bool:
            for rank in self.ranks:
                if rank not in said and (found := notes.read(f"{position}/says/{rank}")) is not None:
                    said[rank] = found
            return len(said) == len(self.ranks)

        notes.wait(all_there, 2.5 * board.PERIOD)
        ended = [each for each in ExitRecord.read_all(notes).values() if each.rank in self.ranks and each.cause is None]
        texts: dict[str, list[int]] = {}
        for rank in self.ranks:
            texts.setdefault(said.get(rank, Op(-1, "has not come that far").to_text()), []).append(rank)
        self._let_all_read(position)
        if ended:
            return LostRankError(in_one_sentence(ended))
        return AgreementError(self._divergence({tuple(ranks): text for text, ranks in texts.items()}, step))

    def _divergence(self, texts: dict[tuple[int, ...], str], step: int) -> str:
        symbols = {ranks: Op.of(text) for ranks, text in sorted(texts.items())}
        reported = "; ".join(f"{ranks_in_words(ranks)} {symbol.words}" for ranks, symbol in symbols.items())
        reported = f"ranks part ways in step {max(1, step)}: {reported}"
        if len({symbol.words for symbol in symbols.values()}) == 1:
            together = next(iter(symbols.values())).words
            reported = f"ranks part ways in step {max(1, step)}, in which all {together}"
        if len({symbol.words for symbol in symbols.values()}) == 1 and (
            unlike := differences({ranks: symbol.conditions for ranks, symbol in symbols.items()})
        ):
            return f"{reported}. {unlike}"
        if all(symbol.words.startswith(_ISSUED) for symbol in symbols.values()):
            return f"{reported}. {_MIXED}"
        if differently := self._trained_differently(symbols):
            return f"{reported}. {differently}"
        remedy = _REMEDY if all(_IN_FORWARD(symbol.words) for symbol in symbols.values()) else ""
        return (
            f"{reported}. All ranks must run the same units in the same order, as "
            "many forwards and backwards, and catch an exception at the same point or not at all; what depends on a "
            f"rank's own data must not decide{remedy}"
        )

    def _trained_differently(self, symbols: Mapping[tuple[int, ...], Op]) -> str:
        """Which parameters of units that ran on all ranks require gradients on some of them, "" for none."""
        backwards = {ranks: symbol for ranks, symbol in symbols.items() if symbol.ran and symbol.trained}
        sets = {ranks: int(symbol.trained, 16) for ranks, symbol in backwards.items()}
        differ = functools.reduce(operator.or_, sets.values(), 0) & ~functools.reduce(operator.and_, sets.values(), -1)
        differ = functools.reduce(operator.and_, (int(symbol.ran, 16) for symbol in backwards.values()), differ)
        names = [name for index, name in enumerate(self._names()) if differ >> index & 1]
        if not names:
            return ""
        first = differ & -differ
        if all(bits & first or int(backwards[those].unreached or "0", 16) & first for those, bits in sets.items()):
            return self._cut_off(first.bit_length() - 1, sets)
        some, others = _with_and_without(first, sets)
        return (
            f"Parameter {names[0]!r} requires a gradient on {some}, and none on {others}"
            f"{f'; ranks differ in {few(names[1:])}, too' if names[1:] else ''}. Set requires_grad alike on all ranks, "
            "between the same two steps"
        )

    def _cut_off(self, index: int, sets: Mapping[tuple[int, ...], int]) -> str:
        """Outputs of the unit that has parameter `index` need a gradient on some ranks only."""
        unit = next(self._entries[key].words for key, numbers in self._numbers.items() if index in numbers)
        some, others = _with_and_without(1 << index, sets)
        return (
            f"The outputs of {unit.removeprefix('entered ')} need a gradient on {some}, and none on {others}, where "
            "its parameters require one as well: something ends the graph there, as detach(), torch.no_grad() or "
            "another choice of outputs does. Do that on all ranks, or on none"
        )

    # -- for the watch -----------------------------------------------------------------------------------------------

    @property
    def doing(self) -> tuple[str, float]:
        """What this rank does, to follow "rank 0: ", and since when by `time.monotonic()`. Called by the watch."""
        doing, since, step = self._doing, self._turned, f"in step {max(1, self._step)}"
        if doing is None:
            left = f"since {self._left} {step}" if self._left else "before the model's first step"
            return f"in the program's own code {left}", since
        if math.isinf(blocked_since()):
            return f"computing in {doing}, {step}", since
        last = "; ".join(map(str, self._events.tail(2)))
        return f"waiting in {doing}, {step}{f' (last: {last})' if last else ''}", since

    @property
    def last_step(self) -> str:
        """What this rank did last, to follow a sentence; "" where it did nothing. Called as the process ends."""
        left = self._doing or self._left
        return f", after {left} in step {max(1, self._step)}" if left else ""

    def fail(self, error: AgreementError, ranks: Sequence[int] | None) -> bool:
        """Go on with nothing that needs one of `ranks` (None: any other), because of `error`; whether that is so."""
        concerned = ranks is None or not set(ranks).isdisjoint(self.ranks)
        if concerned and self._verdict is None:
            self._verdict = error
        return concerned

    def consider(self, alarm: str) -> bool:
        """Judge the alarm of a rank; True when it is settled or does not concern this one. Called by the watch."""
        match parse(alarm):
            case ["unused", str(scope), int(at), bool(calls)]:
                self.unused.consider(scope, at, calls)
                return True
            case [str(scope), int(at), int() | None as issued]:
                pass
            case _:
                return True
        if scope != self._scope or self._verdict is not None or self._meeting == at:
            return True
        passed = self._position > at  # read before `_met`: whoever meets says so first
        if at in self._met:
            if self._abandoned is None or self._abandoned.at != at:
                return True
        elif passed:
            quoted = self._logged_at(at)
            symbol = quoted.symbol if quoted is not None else Op(-1, "went on long ago")
            self._leave_note(at, symbol, alarm=False)
        elif issued is not None and self._position == at and self._issued() > issued:
            self._leave_note(at, Op(-1, f"went on in {self._doing}"), alarm=False)
        if self._store.read(f"{scope}/{at}/verdict") != DIFFERENT:
            return False
        quoted = self._logged_at(at)
        step = quoted.step if quoted is not None else self._step
        error = self._judge(at, step)
        if self._verdict is None:
            print_immediately(f"[flatfsdp, rank {self._rank}] {type(error).__name__}: {error}")
            self._verdict = error
            end_process_unless(lambda: self._was_raised or not self.busy)
        return True


def _names_in(root: weakref.ref[Root]) -> Callable[[], Iterable[str]]:
    """The paths of a model's parameters, as long as it lives."""

    def names() -> Iterable[str]:
        found = root()
        return found.names_of_leaves().values() if found is not None else ()

    return names


@functools.lru_cache(maxsize=PLANS)
def _opening(
    kind: str, unit: int, label: str, schedule: str, conditions: StepConditions, flags: tuple[bool, ...]
) -> Op:
    """A forward of this kind begins; `flags`: which parameters require gradients in it."""
    trained = f"{_bits(flags):x}" if flags else ""
    code = hash63(f"{kind} {unit} {schedule} {conditions} {trained}")
    words = f"began {kind} forward at unit {label}{_with(schedule)}"
    return Op(code, words, f"{(1 << len(flags)) - 1:x}" if flags else "", trained, conditions)


def _bits(flags: Iterable[bool]) -> int:
    return sum(flag << position for position, flag in enumerate(flags))


def _remember(symbols: dict[tuple[UnitData | None, ...], Op], of: tuple[UnitData | None, ...], symbol: Op) -> Op:
    if len(symbols) == PLANS:
        symbols.clear()
    symbols[of] = symbol
    return symbol


def _with(schedule: str) -> str:
    return f" with {schedule}" if schedule else ""


def _with_and_without(bit: int, sets: Mapping[tuple[int, ...], int]) -> tuple[str, str]:
    """The ranks whose sets have `bit`, and the others."""
    some = sorted(rank for ranks, bits in sets.items() if bits & bit for rank in ranks)
    others = sorted(rank for ranks, bits in sets.items() if not bits & bit for rank in ranks)
    return ranks_in_words(some), ranks_in_words(others)
