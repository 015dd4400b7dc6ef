"""Which parameters get no gradient, since no rank's backward reached them: their `.grad` stays as it is.

[Note: unused] A rank knows which parameters it brought gradients to, over all microbatches that are reduced together.
One that brought some to all of them needs to know nothing of the others. One that lacks some has to learn whether
another rank brought them, on the host: what was reduced is 0 in either case. It must not wait for the device either.

In a *round* each rank that takes part adds what it lacks to one text in the store, and reads there what the others
lack. All take part where that was agreed before: in a model's first backward of a kind, with branches or stand-ins
([Note: conditional units], [Note: uneven inputs]), and where a round is expected. Elsewhere those that lack something
do; for the others, which do not wait, their watchdog answers as soon as it reads of it, also after they went on; and at
the next backward of that kind all take part.

What all ranks took part in all of them know, so they expect the same of the next backward ([Note: predicted order]).
Where the host waits for each reduction they rely on it: who lacks what was foreseen posts nothing, and all go on. Who
does not *calls* the others before it takes part in the reduction of the unit in question, without which no other rank
comes to the end of its backward, and waits until all have read it; the round is held when that end has come. After such
a surprise rounds are held without a call for a while, twice as long after each. On accelerators the host does not wait,
so that a missing note proves nothing: there a round is held wherever one is expected.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import AgreementError, ranks_in_words
from ..base.hashing import hash63
from ..watchdog.store import StoreClient, StoreGone
from ..watchdog.watchdog import PATIENCE
from .rank_exchange import RankExchange
from .sequence_predictor import SequencePredictor

NOBODY_KNOWS = 0  # in place of an outcome: not all ranks know it
SOON = 0.05  # seconds that ranks have before those that wait for them request an answer
LATE = 0.5  # seconds after which a rank with a request may have ended
OUTCOMES = 1024  # that are remembered
MOST = 1024  # backwards in a row with rounds, after surprises
KEPT = 256  # backwards of which a rank can still answer for
_ENTRY = re.compile(r"(\d{1,18}):([0-9a-f]+):([01])")


@dataclass
class MissingGradients:
    """What this rank lacked in one backward."""

    kind: int  # of the backward
    lacking: int  # a bit for each parameter of the model
    is_published: bool  # in the store


class UnusedAnswers:
    """What one rank lacked in its last backwards of one model, as its watchdog reports to other ranks on request.

    The main thread and the watchdog share it, so it is behind a lock. It holds nothing of the model, which it outlives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: dict[int, MissingGradients] = {}  # by place in the sequence
        self._requested: set[int] = set()  # such places, to which this rank has yet to come
        self._called_at: set[int] = set()  # of calls
        self._due: set[int] = set()  # kinds of backwards of which all take part in the next
        self._rank, self._scope = 0, ""
        self._store: StoreClient | None = None

    def connect(self, rank: int, scope: str, store: StoreClient) -> None:
        """There are other ranks, which may request it in `store`."""
        self._rank, self._scope, self._store = rank, scope, store

    def forget(self) -> None:
        """All ranks have abandoned an iteration: no next backward is due."""
        with self._lock:
            self._due.clear()

    # -- for the main thread -----------------------------------------------------------------------------------------

    def record(self, at: int, kind: int, lacking: int, *, participates: bool, relied: bool) -> bool:
        """What this rank lacked in the backward of this `kind` at this place; whether it takes part in a round, which
        others may have requested. `relied`: nobody waits for a rank that lacks what is expected."""
        with self._lock:
            participates = participates or at in self._requested or (not relied and kind in self._due)
            self._own[at] = MissingGradients(kind, lacking, is_published=participates)
            self._due.discard(kind)
            if self._requested:
                self._requested = {place for place in self._requested if place > at}
            if self._called_at:
                self._called_at = {place for place in self._called_at if place >= at}
            if len(self._own) > KEPT:
                del self._own[next(iter(self._own))]
        return participates

    def participate_in_next(self, kind: int) -> None:
        """Some ranks did not take part in a round: all do in the next backward of this `kind`."""
        with self._lock:
            self._due.add(kind)

    def record_call(self, at: int) -> None:
        """This rank calls the others in the backward at this place."""
        with self._lock:
            self._called_at.add(at)

    # -- for the watchdog --------------------------------------------------------------------------------------------

    def consider(self, scope: str, at: int, calls: bool) -> None:
        """A rank requests what this one lacks in the backward at this place, or `calls` it to answer."""
        if scope != self._scope or self._store is None:
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
            is_first_call = calls and at not in self._called_at
            if is_first_call:
                self._called_at.add(at)
        if own is not None and answers:
            self._store.append(key, entry_of(self._rank, own.lacking, participates=False))
        if is_first_call:
            self._store.append(f"{key}/calls", entry_of(self._rank, 0, participates=True))

    def publish_what_is_left(self) -> None:
        """This rank answers no more, for its model is gone or its program ends: leave what it would answer."""
        with self._lock:
            text = "".join(entry_of(at, own.lacking, participates=False) for at, own in self._own.items())
        if text and self._store is not None:
            self._store.post(f"{self._scope}/unused/left/{self._rank}", text)


def left_by(rank: int, at: int, scope: str, store: StoreClient) -> int | None:
    """What `rank`, which may have ended, lacked in the backward at this place; None if it has not left that."""
    left = entries_in(store.read(f"{scope}/unused/left/{rank}") or "")
    return left[at][0] if at in left else None


def entry_of(place: int, lacking: int, *, participates: bool) -> str:
    """What a rank, or the last words of one for a place, lacks, as text. `participates`: it did so itself."""
    return f"{place}:{lacking:x}:{int(participates)};"


def entries_in(text: str) -> dict[int, tuple[int, bool]]:
    """By rank, or by place, what is lacking; and whether the rank took part itself. [Note: trust]"""
    found = (_ENTRY.fullmatch(entry) for entry in text.split(";"))
    return {int(each[1]): (int(each[2], 16), each[3] == "1") for each in found if each is not None}


class UnusedParams:
    """One rank's side of the agreement on parameters that no rank brought gradients to, for one model.

    Attributes:
        foreseen: what this rank is to lack in the running backward, as others rely on; None where none does.
        expects: whether all ranks expect the same of this backward, for example that some parameters lack gradients.
        with_data: the ranks that have a batch of their own, where others have stand-ins; None where all have.
        answers: what the watchdog answers others for this rank.
    """

    def __init__(self, peers: RankExchange) -> None:
        self.foreseen: int | None = None
        self.expects = False
        self.with_data: tuple[int, ...] | None = None
        self.answers = UnusedAnswers()
        self._peers = peers
        self._predictor = SequencePredictor()
        self._outcomes: dict[int, dict[int, int]] = {}  # what ranks lacked, by its number
        self._expected: dict[int, int] | None = None
        self._at = -1
        self._kind = 0
        self._all_participate = False
        self._called = False
        self._rounds_left, self._rounds = 0, 1  # since the last surprise, and how many it led to
        self._old: list[str] = []  # keys in the store that nobody will read any more

    def forget(self) -> None:
        """All ranks have abandoned an iteration: what comes next is as new."""
        self._predictor = SequencePredictor()
        self._rounds_left, self._rounds = 0, 1
        self.answers.forget()

    # -- a backward --------------------------------------------------------------------------------------------------

    def begin(self, at: int, code: int) -> None:
        """A backward that reduces begins, as on all ranks, at this place of the sequence, with an op of this `code`."""
        if self._peers.watch is None:
            return
        self._at, self._called, self.foreseen = at, False, None
        self._kind = code if self.with_data is None else hash63(f"{code} {self.with_data}")
        self._predictor.learn(self._kind)
        outcome = self._predictor.expected()
        self._expected = self._outcomes.get(outcome) if outcome is not None else None
        self.expects = self._expected is not None and not self._rounds_left
        self._all_participate = outcome is None or self._expected is not None or self.with_data is not None

    def all_take_part(self) -> None:
        """Ranks run parts of the model as their data will have it: all take part."""
        self._all_participate = True

    def rely(self) -> None:
        """All ranks wait for each reduction, so a rank that lacks what is expected need not post it."""
        assert self._expected is not None
        self.foreseen = self._expected[self._peers.rank]
        self._all_participate = False

    def before_reduction(self, lacking: Iterable[tuple[int, int]]) -> None:
        """A reduction is about to be issued: call the other ranks if this one does not lack what they rely on.

        `lacking`: for each unit whose gradients it completes, the bits of its parameters, and of those among them that
        this rank brings no gradient to.
        """
        assert self.foreseen is not None
        for mask, bits in lacking:
            if not self._called and bits != self.foreseen & mask:
                self._call()

    def lacked_by_all(self, lacking: int) -> int:
        """Gradients were reduced, to which this rank was `lacking` some: what no rank brought any to, a bit each.

        Waits for the other ranks, if that is not foreseen.
        """
        return lacking if self._peers.watch is None else self._agree(lacking) & lacking

    def _agree(self, lacking: int) -> int:
        """What all ranks lack."""
        relied = self.foreseen is not None
        participates = self.answers.record(
            self._at,
            self._kind,
            lacking,
            participates=self._all_participate or self._called or lacking != (self.foreseen or 0),
            relied=relied,
        )
        if not participates:
            expected = self._expected if relied else None
            self._learn(expected)
            return lacking & functools.reduce(operator.and_, expected.values()) if expected is not None else lacking
        rows, all_participated = self._hold_round(lacking)
        if self._expected is not None and not relied and self._rounds_left:
            self._rounds_left -= 1
        elif all_participated and (relied or not self._all_participate):  # a surprise
            self._rounds = min(2 * self._rounds, MOST)
            self._rounds_left = self._rounds
        if all_participated:
            self._learn(rows)
        else:
            self.answers.participate_in_next(self._kind)
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
        """What each rank lacks, and whether all took part."""
        key, relied = self._key(), self.foreseen is not None
        comes = self._all_participate or relied
        entry = entry_of(self._peers.rank, lacking, participates=True)
        found = self._publish(
            key,
            entry,
            "which parameters the others brought no gradients to",
            request_after=LATE * 10 if comes else SOON,
        )
        all_participated = all(took_part for _, took_part in found.values())
        own = self._peers.rank
        if own == min((rank for rank, (_, took_part) in found.items() if took_part), default=own):
            with contextlib.suppress(StoreGone):
                self._peers.store.erase(*self._old)  # whoever is in this round has read all earlier ones
            self._old = []
        self._old += [key, f"{key}/calls"] if relied else [key]
        return {rank: lacks for rank, (lacks, _) in found.items()}, all_participated

    def _call(self) -> None:
        """Let all ranks read that this one does not lack what was foreseen, and wait until they have."""
        self._called = True
        self.answers.record_call(self._at)
        entry = entry_of(self._peers.rank, 0, participates=True)
        what = "the others to read of gradients that are not there, or were not expected"
        self._publish(f"{self._key()}/calls", entry, what, request_after=SOON, calls=True)

    def _publish(
        self, key: str, entry: str, what: str, *, request_after: float, calls: bool = False
    ) -> dict[int, tuple[int, bool]]:
        """Add `entry` at `key`; what stands there when all ranks have done so. Those that do not come by themselves get
        a request after so many seconds."""
        peers = self._peers
        assert peers.watch is not None
        store, began = peers.store, time.monotonic()
        found: dict[int, tuple[int, bool]] = {}
        raised = False

        def complete() -> bool:
            nonlocal raised
            peers.raise_verdict()
            found.update(entries_in(store.read(key) or ""))
            missing = [rank for rank in peers.ranks if rank not in found]
            waited = time.monotonic() - began
            if missing and waited > request_after and not raised:
                raised = True
                store.raise_alarm(json.dumps(["unused", peers.scope, self._at, calls]))
            if missing and waited > LATE:
                for rank in missing:
                    if (lacks := left_by(rank, self._at, peers.scope, store)) is not None:
                        found[rank] = lacks, False
            return not missing

        with peers.watch.waiting(peers.ranks, f"waits for {what}", ends_by_notes=True):
            try:
                store.append(key, entry)
                there = store.wait(complete, PATIENCE)
            except StoreGone:  # its process has gone on, to the program's end
                there = True
        if not there:
            missing = [rank for rank in peers.ranks if rank not in found]
            raise AgreementError(
                f"waited {PATIENCE:.0f} s for {what}: no answer of {ranks_in_words(missing)}. Look for what stopped "
                "the processes of these ranks"
            )
        return {rank: found.get(rank, (0, False)) for rank in peers.ranks}

    def _key(self) -> str:
        return f"{self._peers.scope}/unused/{self._at}"
