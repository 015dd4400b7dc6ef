"""Which parameters get no gradient, since no rank's backward reached them: their `.grad` stays as it is.

[Note: unused] A rank knows which parameters it brought gradients to, over all microbatches that are reduced together.
One that brought some to all of them needs to know nothing of the others. One that lacks some has to learn whether
another rank brought them, on the host: what was reduced is 0 in either case. It must not wait for the device either.

In a *round* each rank that takes part adds what it lacks to one text in the store, and reads there what the others
lack. All take part where that was agreed before: in a model's first backward of a kind, with branches or stand-ins
([Note: branches], [Note: uneven inputs]), and where a round is expected. Elsewhere those that lack something do; for
the others, which do not wait, their watch answers as soon as it hears of it, also after they went on; and at the next
backward of that kind all take part.

What all ranks took part in all of them know, so they expect the same of the next backward ([Note: habit]). Where the
host waits for each reduction they rely on it: who lacks what was foreseen says nothing, and all go on. Who does not
*calls* the others before it takes part in the reduction of the unit in question, without which no other rank comes to
the end of its backward, and waits until all have heard; the round is held when that end has come. After such a surprise
rounds are held without a call for a while, twice as long after each. On accelerators the host does not wait, so that
silence proves nothing: there a round is held wherever one is expected.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ...errors import AgreementError
from ..base.hashing import hash63
from ..watchdog.store import StoreClient, StoreGone
from ..watchdog.watchdog import PATIENCE, Watchdog
from .sequence_predictor import SequencePredictor

if TYPE_CHECKING:
    from ..runtime.unit_data import UnitData

NOBODY_KNOWS = 0  # in place of an outcome: not all ranks know it
SOON = 0.05  # seconds that ranks which wait are given before others are asked
LATE = 0.5  # seconds after which a rank that was asked may have ended
KEPT = 256  # backwards of which a rank can still say what it lacked
OUTCOMES = 1024  # that are remembered
MOST = 1024  # backwards in a row with rounds, after surprises
_ENTRY = re.compile(r"(\d{1,18}):([0-9a-f]+):([01])")


class MissingGradients:
    """What this rank lacked in one backward.

    Attributes:
        kind: of the backward.
        lacking: a bit for each parameter of the model.
        is_published: whether that stands in the store.
    """

    def __init__(self, kind: int, lacking: int, is_published: bool) -> None:
        self.kind = kind
        self.lacking = lacking
        self.is_published = is_published


class UnusedParams:
    """One rank's side of the agreement on parameters that no rank brought gradients to, for one model.

    Attributes:
        foreseen: what this rank is to lack in the running backward, as others rely on; None where none does.
        expects: whether all ranks expect the same of this backward, that some parameters lack gradients say.
        with_data: the ranks that have a batch of their own, where others have stand-ins; None where all have.
    """

    def __init__(self) -> None:
        self.foreseen: int | None = None
        self.expects = False
        self.with_data: tuple[int, ...] | None = None
        self._numbers: Mapping[int, range] = {}  # of a unit's parameters among those of the model, by its id
        self._ranks: tuple[int, ...] = ()
        self._rank = 0
        self._scope = ""
        self._watch: Watchdog | None = None
        self._check: Callable[[], Callable[[], None] | None] = lambda: None
        self._predictor = SequencePredictor()
        self._outcomes: dict[int, dict[int, int]] = {}  # what ranks lacked, by its number
        self._expected: dict[int, int] | None = None
        self._at = -1
        self._kind = 0
        self._all_take_part = False
        self._called = False
        self._rounds_left, self._rounds = 0, 1  # since the last surprise, and how many it led to
        self._old: list[str] = []  # keys in the store that nobody will read any more
        # What the watch shares with the main thread.
        self._lock = threading.Lock()
        self._own: dict[int, MissingGradients] = {}  # by place in the stream
        self._requested: set[int] = set()  # such places, to which this rank has yet to come
        self._heard: set[int] = set()  # of calls
        self._due: set[int] = set()  # kinds of backwards of which all take part in the next

    def connect(
        self,
        rank: int,
        ranks: Sequence[int],
        scope: str,
        watch: Watchdog,
        *,
        numbers: Mapping[int, range],
        check: Callable[[], None],
    ) -> None:
        """There are other `ranks`. `numbers`: of each unit's parameters among those of the model, by id of the unit;
        `check`, a method that is held weakly, raises the error that ends a wait."""
        self._rank, self._ranks, self._scope, self._watch = rank, tuple(ranks), scope, watch
        self._numbers, self._check = numbers, weakref.WeakMethod(check)

    def forget(self) -> None:
        """All ranks have abandoned an iteration: what comes next is as new."""
        self._predictor = SequencePredictor()
        self._rounds_left, self._rounds = 0, 1
        with self._lock:
            self._due.clear()

    # -- a backward --------------------------------------------------------------------------------------------------

    def begin(self, at: int, symbol: int) -> None:
        """A backward that reduces begins, as on all ranks, at this place of the stream, with this `symbol`."""
        if self._watch is None:
            return
        self._at, self._called, self.foreseen = at, False, None
        self._kind = symbol if self.with_data is None else hash63(f"{symbol} {self.with_data}")
        self._predictor.learn(self._kind)
        outcome = self._predictor.expected()
        self._expected = self._outcomes.get(outcome) if outcome is not None else None
        self.expects = self._expected is not None and not self._rounds_left
        self._all_take_part = outcome is None or self._expected is not None or self.with_data is not None

    def branch(self) -> None:
        """Ranks run parts of the model as their data will have it: all take part."""
        self._all_take_part = True

    def rely(self) -> None:
        """All ranks wait for each reduction, so a rank that lacks what is expected need not say so."""
        assert self._expected is not None
        self.foreseen = self._expected[self._rank]
        self._all_take_part = False

    def before_reduction(self, units: Sequence[UnitData]) -> None:
        """`units` are about to be reduced: call the other ranks if one does not lack what they rely on."""
        assert self.foreseen is not None
        for unit in units:
            if not self._called and unit.completes:
                every = self._numbers[id(unit)]
                mask = (1 << every.stop) - (1 << every.start)
                if self._lacking((unit,)) != self.foreseen & mask:
                    self._call()

    def settle(self, units: Sequence[UnitData]) -> None:
        """Gradients were reduced, of these `units` among others: leave out what no rank brought any to.

        All others have what they need. Waits for the other ranks, if that is not foreseen.
        """
        if self._watch is None:
            for unit in units:
                for grads in unit.grads:
                    grads.absent = grads.missing_contributions()
            return
        absent = self._agree(self._lacking(units) if units else 0)
        for unit in units:
            start = self._numbers[id(unit)].start
            for grads in unit.grads:
                grads.absent = frozenset(i for i in grads.missing_contributions() if absent >> start + i & 1)
                start += len(grads.handle.leaves)

    def _lacking(self, units: Sequence[UnitData]) -> int:
        bits = 0
        for unit in units:
            start = self._numbers[id(unit)].start
            for grads in unit.grads:
                for index in grads.missing_contributions():
                    bits |= 1 << start + index
                start += len(grads.handle.leaves)
        return bits

    def _agree(self, lacking: int) -> int:
        """What all ranks lack."""
        at, kind = self._at, self._kind
        relied = self.foreseen is not None
        with self._lock:
            takes_part = self._all_take_part or self._called or at in self._requested or lacking != (self.foreseen or 0)
            takes_part = takes_part or (not relied and kind in self._due)
            self._own[at] = MissingGradients(kind, lacking, is_published=takes_part)
            self._due.discard(kind)
            if self._requested:
                self._requested = {place for place in self._requested if place > at}
            if self._heard:
                self._heard = {place for place in self._heard if place >= at}
            if len(self._own) > KEPT:
                del self._own[next(iter(self._own))]
        if not takes_part:
            expected = self._expected if relied else None
            self._learn(expected)
            return lacking & functools.reduce(operator.and_, expected.values()) if expected is not None else lacking
        rows, all_took_part = self._hold_round(lacking)
        if self._expected is not None and not relied and self._rounds_left:
            self._rounds_left -= 1
        elif all_took_part and (relied or not self._all_take_part):  # a surprise
            self._rounds = min(2 * self._rounds, MOST)
            self._rounds_left = self._rounds
        if all_took_part:
            self._learn(rows)
        else:
            with self._lock:
                self._due.add(kind)
            self._learn(self._expected if relied else None)
        return functools.reduce(operator.and_, rows.values())

    def _learn(self, outcome: dict[int, int] | None) -> None:
        """`outcome`: what all ranks lacked, if all know."""
        # Where none ever lacked anything, nobody has anything to look after.
        if outcome is None or (self._rounds == 1 and not any(outcome.values())):
            self._predictor.learn(NOBODY_KNOWS)
            return
        code = hash63(str(sorted(outcome.items())))
        if len(self._outcomes) == OUTCOMES and code not in self._outcomes:
            self._outcomes.clear()
        self._outcomes[code] = outcome
        self._predictor.learn(code)

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _hold_round(self, lacking: int) -> tuple[dict[int, int], bool]:
        """What each rank lacks, and whether all took part in telling."""
        key, relied = self._key(), self.foreseen is not None
        comes = self._all_take_part or relied
        entry = _entry(self._rank, lacking, takes_part=True)
        found = self._publish(
            key, entry, "which parameters the others brought no gradients to", ask_after=LATE * 10 if comes else SOON
        )
        all_took_part = all(took_part for _, took_part in found.values())
        if self._rank == min((rank for rank, (_, took_part) in found.items() if took_part), default=self._rank):
            with contextlib.suppress(StoreGone):
                self._store.erase(*self._old)  # whoever is in this round has read all earlier ones
            self._old = []
        self._old += [key, f"{key}/heard"] if relied else [key]
        return {rank: lacks for rank, (lacks, _) in found.items()}, all_took_part

    def _call(self) -> None:
        """Let all ranks hear that this one does not lack what was foreseen, and wait until they have."""
        self._called = True
        with self._lock:
            self._heard.add(self._at)
        entry = _entry(self._rank, 0, takes_part=True)
        what = "the others to hear of gradients that are not there, or were not expected"
        self._publish(f"{self._key()}/heard", entry, what, ask_after=SOON, calls=True)

    def _publish(
        self, key: str, entry: str, what: str, *, ask_after: float, calls: bool = False
    ) -> dict[int, tuple[int, bool]]:
        """Add `entry` at `key`; what stands there when all ranks have done so. Those that do not come by themselves are
        asked after so many seconds."""
        assert self._watch is not None
        store, began = self._store, time.monotonic()
        found: dict[int, tuple[int, bool]] = {}
        sounded = False

        def complete() -> bool:
            nonlocal sounded
            if (check := self._check()) is not None:
                check()
            found.update(_entries(store.read(key) or ""))
            missing = [rank for rank in self._ranks if rank not in found]
            waited = time.monotonic() - began
            if missing and waited > ask_after and not sounded:
                sounded = True
                store.raise_alarm(json.dumps(["unused", self._scope, self._at, calls]))
            if missing and waited > LATE:
                found.update({rank: (lacks, False) for rank in missing for lacks in self._last_words(rank)})
            return not missing

        with self._watch.waiting(self._ranks, f"waits for {what}", settled_by_notes=True):
            try:
                store.append(key, entry)
                there = store.wait(complete, PATIENCE)
            except StoreGone:  # its process has gone on, to the program's end
                there = True
        if not there:
            missing = [rank for rank in self._ranks if rank not in found]
            raise AgreementError(f"waited {PATIENCE:.0f} s for {what}: no word of ranks {missing}")
        return {rank: found.get(rank, (0, False)) for rank in self._ranks}

    def _key(self) -> str:
        return f"{self._scope}/unused/{self._at}"

    @property
    def _store(self) -> StoreClient:
        assert self._watch is not None
        return self._watch.store

    # -- for the watch -----------------------------------------------------------------------------------------------

    def consider(self, scope: str, at: int, calls: bool) -> None:
        """A rank asks what this one lacks in the backward at this place, or `calls` it to say so. Called by the
        watch."""
        if scope != self._scope or self._watch is None:
            return
        key = f"{scope}/unused/{at}"
        with self._lock:
            own = self._own.get(at)
            if own is None:
                self._requested.add(at)
            answers = own is not None and not own.is_published
            if own is not None and answers:
                own.is_published = True
                self._due.add(own.kind)
            hears = calls and at not in self._heard
            if hears:
                self._heard.add(at)
        if own is not None and answers:
            self._store.append(key, _entry(self._rank, own.lacking, takes_part=False))
        if hears:
            self._store.append(f"{key}/heard", _entry(self._rank, 0, takes_part=True))

    def publish_last_words(self) -> None:
        """This rank answers no more, for its model is gone or its program ends: leave what it would say. Called by the
        watch."""
        with self._lock:
            text = "".join(_entry(at, own.lacking, takes_part=False) for at, own in self._own.items())
        if text:
            self._store.post(f"{self._scope}/unused/left/{self._rank}", text)

    def _last_words(self, rank: int) -> Iterator[int]:
        """What `rank`, which may have ended, lacked in this backward, if it said so."""
        left = _entries(self._store.read(f"{self._scope}/unused/left/{rank}") or "")
        if self._at in left:
            yield left[self._at][0]


def _entry(place: int, lacking: int, *, takes_part: bool) -> str:
    return f"{place}:{lacking:x}:{int(takes_part)};"


def _entries(text: str) -> dict[int, tuple[int, bool]]:
    """By rank, or by place, what is lacking; and whether the rank took part itself. [Note: trust]"""
    found = (_ENTRY.fullmatch(entry) for entry in text.split(";"))
    return {int(each[1]): (int(each[2], 16), each[3] == "1") for each in found if each is not None}
