"""What ranks must have in common, compared before it matters: the model, the values it begins with, and the order of its units.

[Note: agreement] The *stream* of a model is what its units do that involves other ranks, as a sequence of symbols: a forward
begins, a unit is entered, a forward ends, a backward begins (with the plan of its collectives), an iteration is abandoned. It must
be the same on all ranks. Symbols that nothing lets a rank expect are compared in an exchange of fixed size; that is the first
iteration. After it every rank compares its next symbol with what it expects ([Note: habit]) and goes on at no cost where they are
equal. A rank that does something else leaves a note in the store and waits for those of the others: if all say the same it is a new
order, else an error. Ranks that did as expected learn of it from their watch ([Note: watch]).

Process groups that move nothing (torch's fake ones) issue the same collectives and compare nothing: there is no other rank.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from . import watch
from .api import MixedPrecision
from .comm import Traffic, Transport
from .errors import AgreementError, FlatFSDPError, fail, logger, warn
from .policy.habit import Habit
from .watch import Board, Watch, current_watch, end_process_unless, expecting, speak

if TYPE_CHECKING:
    from .root import Root
    from .unit import Unit

TRAINING, EVALUATION = "a training", "an evaluation"  # kinds of forward, with and without gradients
SAME, DIFFERENT = "same", "different"  # what a meeting of notes ends with
REMEMBERED = 1024  # symbols that the watch can still quote

# Models over the same ranks are told apart by the order in which they first run, which all their ranks share.
_models: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


class Symbol(NamedTuple):
    """One step of the stream: a number that is equal on all ranks, and its words."""

    code: int
    words: str


class Said(NamedTuple):
    """A symbol, its place in the stream, and how many iterations had begun before it."""

    at: int
    symbol: Symbol
    step: int


@functools.lru_cache(maxsize=4096)
def number(text: str) -> int:
    """63 bits of a hash of `text`, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Agreement:
    """One rank's side of the agreement of one model.

    Attributes:
        check_values: "warn", "raise" or "off": what becomes of ranks that begin from different values.
        ranks: the global ranks that take part, once compared.
    """

    def __init__(self, *, check_values: str) -> None:
        self.check_values = check_values
        self.ranks: tuple[int, ...] = ()
        self.busy = False  # inside an iteration, where this rank may wait for others
        self._rank = 0
        self._axes: list[Transport] = []
        self._sharded = False
        self._traffic = Traffic()
        self._watch: Watch | None = None  # where there is another rank to hear from
        self._scope = ""  # names this model in the store
        self._exchanges = 0
        self._values_due = check_values != "off"
        # The stream: what is expected, what came, and how far it has come.
        self._habit = Habit()
        self._said: deque[Said] = deque(maxlen=REMEMBERED)
        self._place = 0
        self._step = 0
        self._entries: dict[int, Symbol] = {}  # by id of the unit
        self._places: dict[int, int] = {}
        self._kind = ""  # of the running forward
        self._opening: str | None = None  # the kind of forward that the next unit begins
        self._doing: str | None = None  # which part of the stream runs, None between iterations
        self._issued_before = 0
        # Meetings: places at which this rank left a note itself, and the last one that all left behind.
        self._met: deque[int] = deque(maxlen=64)
        self._meeting: int | None = None  # the place where the main thread waits for the others
        self._settled: int | None = None
        self._abandoned: Said | None = None
        self._verdict: AgreementError | None = None  # the ranks have parted: nothing goes on
        self._told = False  # the main thread has raised it

    # -- the model ---------------------------------------------------------------------------------------------------

    def compare(self, root: Root, *, training: bool) -> None:
        """Compare the units of all ranks, and with `training` the values they begin with. Collective over all axes.

        Raises:
            AgreementError: on every rank, naming the first difference.
        """
        self._axes = _axes(root)
        if not self._axes:
            return
        self._rank = self._axes[0].group.ranks[self._axes[0].group.rank]
        self._sharded = any(unit.groups.shard.size > 1 for unit in root.units)
        self._traffic = root.traffic
        for index, unit in enumerate(root.units):
            self._entries[id(unit)] = Symbol(number(f"unit {index}"), f"entered unit {unit.label}")
            self._places[id(unit)] = index
        facts = describe(root)
        values = self._values(root) if training else []
        members = sorted({rank for axis in self._axes for rank in axis.group.ranks})
        with expecting(members, f"compares its model with that of ranks {', '.join(map(str, members))}"):
            answers = self._exchange(number(json.dumps(facts)), number(str(values)) if values else 0)
        if answers is None:
            return
        self.ranks = tuple(sorted(answers))
        self._scope = f"{number(str(self.ranks)):x}.{next(_models[self.ranks])}"
        self._watch = current_watch()
        self._watch.add(self)
        models = {rank: answer[0] for rank, answer in answers.items()}
        if len(set(models.values())) > 1:
            texts = self._publish(json.dumps(facts), models)
            self._fail(_first_difference({ranks: json.loads(text) for ranks, text in texts.items()}))
        if training:
            self._judge_values(root, values, {rank: answer[1] for rank, answer in answers.items()})

    def compare_values(self, root: Root) -> None:
        """Compare the values that ranks began with, once. Collective over all axes at the first call, free after it."""
        if not self._values_due or not self._axes:
            return
        values = self._values(root)
        answers = self._exchange(number("values"), number(str(values)))
        if answers is not None:
            self._require_same({rank: answer[0] for rank, answer in answers.items()}, Symbol(0, "began to train"))
            self._judge_values(root, values, {rank: answer[1] for rank, answer in answers.items()})

    def _values(self, root: Root) -> list[tuple[str, int | None]]:
        if not self._values_due:
            return []
        self._values_due = False
        out = []
        for unit in root.units:
            if unit.beginnings is not None:
                prefix = f"{unit.name}." if unit.name else ""
                out += [(prefix + path, value) for path, value in unit.beginnings.held(unit.handles)]
                unit.beginnings = None
        return out

    def _judge_values(self, root: Root, values: list[tuple[str, int | None]], sums: dict[int, int]) -> None:
        if len(set(sums.values())) == 1 or 0 in sums.values():
            return  # equal, or a rank does not train: what it does instead is compared next
        # Ranks may merely hold different ones: now that all know it, each shows its own.
        block = torch.tensor([[value is not None, value or 0] for _, value in values], device=root.device.device)
        for axis in self._axes:
            block = axis.gather_now(block)
        block = block.view(len(sums), len(values), 2).cpu()
        held, found = block[..., 0].bool().all(0), block[..., 1]
        different = ((found != found[0]).any(0) & held).tolist()
        names = [path for (path, _), is_different in zip(values, different, strict=True) if is_different]
        if not names:
            return
        message = (
            f"ranks begin with different values of {len(names)} of {len(values)} parameters: {_few(names)}. What they "
            "gather is pieced together from different models. Pass sync_module_states=True, give all ranks the same "
            'seed, or load a checkpoint before the first step; check_values="off" if it is meant'
        )
        if self.check_values == "raise":
            raise AgreementError(message)
        warn(message)

    # -- the order ---------------------------------------------------------------------------------------------------

    def begin_forward(self, *, training: bool) -> None:
        """An outermost forward begins. If the last iteration was abandoned, wait for the others to say the same."""
        if not self._axes:
            return
        self.busy = True
        self._kind = self._opening = TRAINING if training else EVALUATION
        if self._abandoned is not None:
            at, symbol = self._abandoned.at, self._abandoned.symbol
            self._meet(at)
            self._abandoned = None
            self._habit.forget_present()
            self._follow(symbol)

    def check_order(self, unit: Unit) -> None:
        """`unit` is about to be gathered: is it the one that all ranks gather? Collective in the first iteration.

        Where no unit is sharded a forward communicates nothing, and ranks may differ in it.

        Raises:
            AgreementError: on every rank, within seconds.
        """
        if not self._sharded:
            return
        symbol = self._entries[id(unit)]
        if self._opening is not None:
            words = f"began {self._opening} forward at unit {unit.label}"
            opening = Symbol(number(f"{self._opening} {symbol.code}"), words)
            self._opening = None
            self._start(f"the forward of unit {unit.label}")
            self._next(opening, unit=symbol.code, opens=True)
        else:
            self._doing = f"the forward of unit {unit.label}"
            self._next(symbol, unit=symbol.code)

    def end_forward(self) -> None:
        """The outermost forward has ended."""
        if self._doing is not None:
            self._next(_ENDED[self._kind], completes=self._kind != TRAINING)
        self.rest()

    def check_backward(self, root: Root) -> None:
        """A backward begins: will all ranks issue the same collectives in it? Collective in the first iteration.

        Raises:
            AgreementError: on every rank, within seconds.
        """
        if not self._axes:
            return
        record = root.record
        entered, anchored = ([self._places[id(unit)] for unit in units] for units in (record.entered, record.anchored))
        reduced = [
            (self._places[id(unit)], kind)
            for unit in record.anchored
            for kind, handle in enumerate(unit.handles)
            if any(leaf.requires_grad for leaf in handle.leaves)
        ]
        how = "" if root.sync else " under no_sync()"
        words = f"began a backward{how} through {len(anchored)} units, {len(reduced)} flat gradients"
        self.busy = True
        self._start("a backward")
        symbol = Symbol(number(f"{root.sync} {entered} {anchored} {reduced}"), words)
        self._next(symbol, opens=not self._sharded, completes=True)

    def rest(self) -> None:
        """Back to between iterations, where this rank waits for nobody."""
        self._doing = None
        self.busy = False

    def abandon(self, error: BaseException | None) -> None:
        """`error` ended a forward: tell the others, or raise the disagreement that it stems from."""
        if error is not None:
            self.explain(error)
        self.say_abandoned(error)

    def say_abandoned(self, error: BaseException | None) -> None:
        """An iteration ends here by an exception: tell the others, without waiting for them or raising.

        Whether all ranks abandoned it at the same place shows when the next forward begins.
        """
        doing, self._opening = self._doing, None
        if doing is None or self._watch is None or self._verdict is not None:
            return
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return
        issued = self._issued()
        because = f" after {type(error).__name__}: {error}" if error is not None else ""
        symbol = Symbol(number(f"abandoned {issued}"), f"abandoned its iteration in {doing}{because}")
        self._abandoned = Said(self._place, symbol, self._step)
        self._met.append(self._place)
        try:
            self._leave_note(self._place, symbol, issued=issued, alarm=True)
        except RuntimeError as lost:  # the store is gone; the exception under way matters more
            logger.debug("could not tell the other ranks that an iteration was abandoned: %s", lost)

    def explain(self, error: BaseException) -> None:
        """Raise the `AgreementError` behind `error`, if it is a failure of the communication and there is one."""
        if self._watch is None or isinstance(error, FlatFSDPError):
            return
        if self._verdict is None and _is_communication(error):
            # The connection broke, and the reason may still be on its way.
            self._watch.board.wait(lambda: self._verdict, 2.5 * watch.PERIOD)
        self._raise_verdict(error)

    def _raise_verdict(self, cause: BaseException | None = None) -> None:
        if self._verdict is not None:
            self._told = True
            raise self._verdict from cause

    def _start(self, doing: str) -> None:
        self._doing = doing
        self._issued_before = self._traffic.issued

    def _issued(self) -> int:
        return self._traffic.issued - self._issued_before

    def _next(
        self, symbol: Symbol, *, unit: int | None = None, opens: bool = False, completes: bool = False
    ) -> None:
        self._raise_verdict()
        expected = self._habit.expected()
        if expected != symbol.code:
            if expected is None:
                self._agree_by_exchange(symbol)
            elif self._watch is not None:
                self._met.append(self._place)
                self._leave_note(self._place, symbol, alarm=True)
                self._meet(self._place)
        self._follow(symbol, unit=unit, opens=opens, completes=completes)

    def _follow(
        self, symbol: Symbol, *, unit: int | None = None, opens: bool = False, completes: bool = False
    ) -> None:
        self._habit.learn(symbol.code, unit=unit, completes=completes)
        self._said.append(Said(self._place, symbol, self._step))
        self._step += opens
        self._place += 1

    # -- exchanges ---------------------------------------------------------------------------------------------------

    def _exchange(self, code: int, extra: int = 0) -> dict[int, tuple[int, int]] | None:
        """Every rank's two numbers, None where process groups move nothing. Collective, always of one size."""
        self._exchanges += 1
        block = torch.tensor([self._rank, code, extra], device=self._axes[0].device.device)
        for axis in self._axes:
            block = axis.gather_now(block)
        if any(axis.group.backend == "fake" for axis in self._axes):
            return None
        return {rank: (code, extra) for rank, code, extra in block.view(-1, 3).tolist()}

    def _agree_by_exchange(self, symbol: Symbol) -> None:
        answers = self._exchange(symbol.code)
        if answers is not None:
            self._require_same({rank: answer[0] for rank, answer in answers.items()}, symbol)

    def _require_same(self, codes: dict[int, int], symbol: Symbol) -> None:
        if len(set(codes.values())) > 1:
            self._fail(self._parting(self._publish(symbol.words, codes), self._step))

    def _publish(self, text: str, codes: dict[int, int]) -> dict[tuple[int, ...], str]:
        """The texts of ranks whose codes differ, by the ranks that share one. All ranks call it."""
        board, place = self._board, f"{self._scope}/x{self._exchanges}"
        board.post(f"{place}/{self._rank}", text)
        alike: dict[int, list[int]] = {}
        for rank in sorted(codes):
            alike.setdefault(codes[rank], []).append(rank)
        texts: dict[tuple[int, ...], str] = {}
        for ranks in alike.values():
            key = f"{place}/{ranks[0]}"
            texts[tuple(ranks)] = board.wait(functools.partial(board.read, key), 10 * watch.PERIOD) or "does not answer"
        self._let_all_read(place)
        return texts

    def _fail(self, message: str) -> NoReturn:
        self._verdict = AgreementError(message)
        self._told = True
        fail(self._verdict)

    # -- notes -------------------------------------------------------------------------------------------------------

    @property
    def _board(self) -> Board:
        assert self._watch is not None
        return self._watch.board

    def _leave_note(self, at: int, symbol: Symbol, *, alarm: bool, issued: int | None = None) -> None:
        """Say what this rank does at `at`, and the verdict if that decides it.

        `issued`: how many collectives it had issued when it abandoned its iteration, None if it did not. It will issue no
        more, so a rank that has issued more waits in vain.
        """
        board, place = self._board, f"{self._scope}/{at}"
        board.post(f"{place}/says/{self._rank}", symbol.words)
        if board.first(f"{place}/first", str(symbol.code)) != str(symbol.code):
            board.post(f"{place}/verdict", DIFFERENT)
            return
        notes = board.count(f"{place}/notes")
        if notes == len(self.ranks):
            board.post(f"{place}/verdict", SAME)
        elif notes == 1 and alarm:
            assert self._watch is not None
            self._watch.sound(json.dumps([self._scope, at, issued]))

    def _meet(self, at: int) -> None:
        """Wait for the notes of all ranks at `at`; an error unless all are the same."""
        board, place = self._board, f"{self._scope}/{at}"
        self._meeting = at
        verdict = board.wait(lambda: self._verdict or board.read(f"{place}/verdict"), watch.PATIENCE)
        self._raise_verdict()
        if verdict != SAME:
            self._fail(self._judge(at, self._step))
        self._meeting = None
        if self._rank == self.ranks[0]:
            # Whoever has a note here has left all earlier places: the notes there can go.
            if self._settled is not None:
                old = f"{self._scope}/{self._settled}"
                board.erase(f"{old}/first", f"{old}/notes", f"{old}/verdict", *(f"{old}/says/{rank}" for rank in self.ranks))
            self._settled = at

    def _judge(self, at: int, step: int) -> str:
        """What the ranks did at `at`, from everybody's note."""
        board, place = self._board, f"{self._scope}/{at}"
        notes: dict[int, str] = {}

        def all_there() -> bool:
            for rank in self.ranks:
                if rank not in notes and (found := board.read(f"{place}/says/{rank}")) is not None:
                    notes[rank] = found
            return len(notes) == len(self.ranks)

        board.wait(all_there, 2.5 * watch.PERIOD)
        texts: dict[str, list[int]] = {}
        for rank in self.ranks:
            texts.setdefault(notes.get(rank, "has not come that far"), []).append(rank)
        self._let_all_read(place)
        return self._parting({tuple(ranks): text for text, ranks in texts.items()}, step)

    def _let_all_read(self, place: str) -> None:
        """Give the others time to read, before an error ends this process and perhaps the store with it."""
        board = self._board
        board.count(f"{place}/read")
        board.wait(lambda: board.count(f"{place}/read", 0) >= len(self.ranks), 2.5 * watch.PERIOD)

    def _parting(self, texts: dict[tuple[int, ...], str], step: int) -> str:
        told = "; ".join(f"{_ranks(ranks)} {text}" for ranks, text in sorted(texts.items()))
        return (
            f"ranks part ways in step {max(1, step)}: {told}. All ranks must run the same units in the same order, as many forwards "
            "and backwards, and catch an exception at the same point or not at all; what depends on a rank's own data must not decide"
        )

    # -- for the watch -----------------------------------------------------------------------------------------------

    def consider(self, alarm: str) -> bool:
        """Judge the alarm of a rank; True when it is settled or does not concern this one. Runs on the watch's thread."""
        scope, at, issued = json.loads(alarm)
        if scope != self._scope or self._verdict is not None or self._meeting == at:
            return True
        passed = self._place > at  # read before `_met`: whoever meets says so first
        if at in self._met:
            if self._abandoned is None or self._abandoned.at != at:
                return True
        elif passed:
            quoted = next((said for said in self._said if said.at == at), None)
            symbol = quoted.symbol if quoted is not None else Symbol(-1, "went on long ago")
            self._leave_note(at, symbol, alarm=False)
        elif issued is not None and self._place == at and self._issued() > issued:
            self._leave_note(at, Symbol(-1, f"went on in {self._doing}"), alarm=False)
        if self._board.read(f"{scope}/{at}/verdict") != DIFFERENT:
            return False
        step = next((said.step for said in self._said if said.at == at), self._step)
        error = AgreementError(self._judge(at, step))
        if self._verdict is None:
            speak(f"[flatfsdp, rank {self._rank}] {type(error).__name__}: {error}")
            self._verdict = error
            end_process_unless(lambda: self._told or not self.busy)
        return True


_ENDED = {kind: Symbol(number(f"ended {kind}"), "ended its forward") for kind in (TRAINING, EVALUATION)}


# -- words -----------------------------------------------------------------------------------------------------------------


def _is_communication(error: BaseException) -> bool:
    """Whether a backend lost its peers; gloo says so with a plain `RuntimeError`."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _axes(root: Root) -> list[Transport]:
    """The axes over which the model is spread, each once."""
    found: dict[int, Transport] = {}
    for unit in reversed(root.units):
        for axis in (unit.scatter, unit.replicate):
            if axis is not None and axis.group.size > 1:
                found.setdefault(id(axis.group.process_group), axis)
    return list(found.values())


def describe(root: Root) -> list[tuple[str, str]]:
    """All that the ranks of a model must have in common, as (subject, value) in a fixed order."""
    facts = [("check_values", root.agreement.check_values)]
    for unit in root.units:
        subject = f"unit {unit.label}"
        groups = unit.groups
        facts += [
            (subject, f"of class {type(unit.module).__name__}"),
            (f"{subject}, sharding_strategy", groups.strategy.name),
            (
                f"{subject}, ranks",
                f"{groups.shard.size} x {groups.replicate.size if groups.replicate is not None else 1}",
            ),
            (f"{subject}, use_orig_params", ", ".join(str(handle.use_orig_params) for handle in unit.handles[:1])),
            (f"{subject}, mixed_precision", _unlike_default(unit.mixed_precision)),
            (f"{subject}, backward_prefetch", str(unit.backward_prefetch)),
            (f"{subject}, forward_prefetch", str(unit.forward_prefetch)),
            (f"{subject}, tied to", ", ".join(owner.label for owner in unit.owners)),
        ]
        for handle in unit.handles:
            for spec, leaf in zip(handle.layout.params, handle.leaves, strict=True):
                dtype = str(handle.shard.dtype).removeprefix("torch.")
                grad = "requires_grad" if leaf.requires_grad else "no requires_grad"
                stride = "" if spec.stride is None else f" strides {spec.stride}"
                facts.append((f"{subject}, parameter {spec.name}", f"{dtype} {spec.shape}{stride}, {grad}"))
    return facts


def _unlike_default(precision: MixedPrecision) -> str:
    plain = MixedPrecision()
    settings = [(field.name, getattr(precision, field.name)) for field in fields(precision)]
    return ", ".join(f"{name}={value}" for name, value in settings if value != getattr(plain, name)) or "none"


def _first_difference(texts: dict[tuple[int, ...], list[list[str]]]) -> str:
    for rows in itertools.zip_longest(*texts.values(), fillvalue=["nothing more", ""]):
        if any(row != rows[0] for row in rows):
            break
    subjects = {subject for subject, _ in rows}
    together = len(subjects) == 1
    told = "; ".join(
        f"{_ranks(ranks)}: {value if together else f'{subject} {value}'.strip()}"
        for ranks, (subject, value) in zip(texts, rows, strict=True)
    )
    place = f" in {subjects.pop()}" if together else ""
    return (
        f"ranks construct different models; the first difference is{place}: {told}. Build the same module with the same arguments of "
        "FullyShardedDataParallel on every rank"
    )
