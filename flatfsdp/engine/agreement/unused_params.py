"""The agreement on parameters that no rank computed a gradient for, whose `.grad` then stays unchanged.

[Note: unused] A rank knows for which parameters it computed gradients, over all microbatches that are reduced together.
A rank that computed all gradients needs no information about the others. A rank that lacks some has to find out whether
another rank computed them, on the host, and without a wait for the device: the reduced value may be 0 in either case.

In a *round* each participating rank adds the parameters that it lacks to one text in the store, and reads those of the
others. All ranks participate if that was agreed before: in a model's first backward of a kind, with branches or
stand-ins ([Note: conditional units], [Note: uneven inputs]), and if a round is expected. Otherwise those participate
that lack some; for the others, which do not wait, their watchdog answers as soon as it reads the request, even after
they continued; and in the next backward of that kind all participate.

The outcome of a round in which all ranks participated is known to all of them, so they expect the same in the next
backward ([Note: predicted order]). If the host waits for each reduction, they rely on it: a rank that lacks the
expected parameters posts nothing, and all continue. Any other rank *calls* the others before it joins the reduction of
the unit concerned, without which no rank ends its backward, and waits until all have read the call; the round is held
at the end of the backward. After a surprise rounds are held without a call for some backwards, twice as many each time.
On accelerators the host does not wait, so a missing note proves nothing: a round is held whenever one is expected.
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

NOBODY_KNOWS = 0  # the symbol for an outcome that not all ranks know
SOON = 0.05  # seconds after which waiting ranks request an answer
LATE = 0.5  # seconds after which a rank that does not answer a request may have ended
OUTCOMES = 1024  # the most outcomes that are kept
MOST = 1024  # the most backwards in a row with rounds, after surprises
KEPT = 256  # the last backwards, for which a rank can still answer
_ENTRY = re.compile(r"(\d{1,18}):([0-9a-f]+):([01])")


@dataclass
class MissingGradients:
    """The parameters for which this rank computed no gradient in one backward."""

    kind: int  # of the backward
    lacking: int  # a bit for each parameter of the model
    is_published: bool  # in the store


class UnusedAnswers:
    """The missing gradients of one rank in its last backwards of one model, which its watchdog reports on request.

    It is shared by the main thread and the watchdog, and protected by a lock. It outlives the model without holding it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: dict[int, MissingGradients] = {}  # by place in the sequence
        self._requested: set[int] = set()  # places with a request that this rank has yet to reach
        self._called_at: set[int] = set()  # places with a call
        self._due: set[int] = set()  # kinds of backwards in whose next round all ranks participate
        self._rank, self._scope = 0, ""
        self._store: StoreClient | None = None

    def connect(self, rank: int, scope: str, store: StoreClient) -> None:
        """Set the `store` in which other ranks may send requests."""
        self._rank, self._scope, self._store = rank, scope, store

    def forget(self) -> None:
        """Reset the state after all ranks have abandoned an iteration."""
        with self._lock:
            self._due.clear()

    # -- for the main thread -----------------------------------------------------------------------------------------

    def record(self, at: int, kind: int, lacking: int, *, participates: bool, relied: bool) -> bool:
        """Record what this rank lacks in the backward of this `kind` at this place; returns whether it participates in
        a round, which others may have requested. `relied`: no rank waits for one that lacks what is expected."""
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
        """After a round without some ranks, let all participate in the next backward of this `kind`."""
        with self._lock:
            self._due.add(kind)

    def record_call(self, at: int) -> None:
        """Record that this rank calls the others in the backward at this place."""
        with self._lock:
            self._called_at.add(at)

    # -- for the watchdog --------------------------------------------------------------------------------------------

    def consider(self, scope: str, at: int, calls: bool) -> None:
        """Answer a request of another rank for the backward at this place; or its call (`calls`)."""
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
        """Leave all answers of this rank in the store, because its model is deleted or its program ends."""
        with self._lock:
            text = "".join(entry_of(at, own.lacking, participates=False) for at, own in self._own.items())
        if text and self._store is not None:
            self._store.post(f"{self._scope}/unused/left/{self._rank}", text)


def left_by(rank: int, at: int, scope: str, store: StoreClient) -> int | None:
    """The bits that `rank`, which may have ended, lacked in the backward at this place; None if it has left none."""
    left = entries_in(store.read(f"{scope}/unused/left/{rank}") or "")
    return left[at][0] if at in left else None


def entry_of(place: int, lacking: int, *, participates: bool) -> str:
    """The text for `lacking` of `place`: a rank, or a place in the sequence. `participates`: the rank took part."""
    return f"{place}:{lacking:x}:{int(participates)};"


def entries_in(text: str) -> dict[int, tuple[int, bool]]:
    """(lacking bits, whether the rank took part itself) of all entries in `text`, by rank or place. [Note: trust]"""
    found = (_ENTRY.fullmatch(entry) for entry in text.split(";"))
    return {int(each[1]): (int(each[2], 16), each[3] == "1") for each in found if each is not None}


class UnusedParams:
    """One rank's side of the agreement on parameters without gradients on any rank, for one model.

    Attributes:
        foreseen: the bits that this rank is expected to lack in the running backward, if others rely on it; else None.
        expects: whether all ranks expect the same outcome of this backward, for example some missing gradients.
        with_data: the ranks that have a batch of their own, if others have stand-ins; None if all have.
        answers: the answers of the watchdog for this rank.
    """

    def __init__(self, peers: RankExchange) -> None:
        self.foreseen: int | None = None
        self.expects = False
        self.with_data: tuple[int, ...] | None = None
        self.answers = UnusedAnswers()
        self._peers = peers
        self._predictor = SequencePredictor()
        self._outcomes: dict[int, dict[int, int]] = {}  # the bits that ranks lacked, by the symbol of the outcome
        self._expected: dict[int, int] | None = None
        self._at = -1
        self._kind = 0
        self._all_participate = False
        self._called = False
        self._rounds_left, self._rounds = 0, 1  # remaining rounds after the last surprise, and their initial number
        self._old: list[str] = []  # keys in the store that no rank will read again

    def forget(self) -> None:
        """Reset all expectations after all ranks have abandoned an iteration."""
        self._predictor = SequencePredictor()
        self._rounds_left, self._rounds = 0, 1
        self.answers.forget()

    # -- a backward --------------------------------------------------------------------------------------------------

    def begin(self, at: int, code: int) -> None:
        """Begin a backward that reduces, at this place of the sequence, with an op of this `code`, as on all ranks."""
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
        """Let all ranks participate, because their data decide which parts of the model they run."""
        self._all_participate = True

    def rely(self) -> None:
        """Rely on the expected outcome: all ranks wait for each reduction, so a rank posts only differences from it."""
        assert self._expected is not None
        self.foreseen = self._expected[self._peers.rank]
        self._all_participate = False

    def before_reduction(self, lacking: Iterable[tuple[int, int]]) -> None:
        """Before a reduction is issued, call the other ranks if this rank does not lack exactly the foreseen gradients.

        `lacking`: for each unit whose gradients it completes, the bits of its parameters, and of those among them for
        which this rank computes no gradient.
        """
        assert self.foreseen is not None
        for mask, bits in lacking:
            if not self._called and bits != self.foreseen & mask:
                self._call()

    def lacked_by_all(self, lacking: int) -> int:
        """The bits of parameters without gradients on any rank, after a reduction in which this one was `lacking` some.

        Waits for the other ranks, unless the outcome is relied on.
        """
        return lacking if self._peers.watch is None else self._agree(lacking) & lacking

    def _agree(self, lacking: int) -> int:
        """The bits that all ranks lack."""
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
        """Learn the `outcome`, by rank, if all ranks know it; None otherwise."""
        # No rounds are needed as long as no rank ever lacked a gradient.
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
        """The bits that each rank lacks, and whether all took part."""
        key, relied = self._key(), self.foreseen is not None
        comes = self._all_participate or relied
        entry = entry_of(self._peers.rank, lacking, participates=True)
        found = self._publish(
            key,
            entry,
            "the other ranks to report which parameters they have no gradients for",
            request_after=LATE * 10 if comes else SOON,
        )
        all_participated = all(took_part for _, took_part in found.values())
        own = self._peers.rank
        if own == min((rank for rank, (_, took_part) in found.items() if took_part), default=own):
            with contextlib.suppress(StoreGone):
                self._peers.store.erase(*self._old)  # all ranks in this round have read the earlier ones
            self._old = []
        self._old += [key, f"{key}/calls"] if relied else [key]
        return {rank: lacks for rank, (lacks, _) in found.items()}, all_participated

    def _call(self) -> None:
        """Post that this rank does not lack what was foreseen, and wait until all ranks have read it."""
        self._called = True
        self.answers.record_call(self._at)
        entry = entry_of(self._peers.rank, 0, participates=True)
        what = "the other ranks to read about missing or unexpected gradients"
        self._publish(f"{self._key()}/calls", entry, what, request_after=SOON, calls=True)

    def _publish(
        self, key: str, entry: str, what: str, *, request_after: float, calls: bool = False
    ) -> dict[int, tuple[int, bool]]:
        """Append `entry` at `key`; returns all entries there when all ranks have added theirs. After `request_after`
        seconds, a request is sent to the others."""
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
            except StoreGone:  # the process that served it has continued to the program's end
                there = True
        if not there:
            missing = [rank for rank in peers.ranks if rank not in found]
            raise AgreementError(
                f"waited {PATIENCE:.0f} s for {what}: no answer from {ranks_in_words(missing)}. Find out what stopped "
                "the processes of these ranks"
            )
        return {rank: found.get(rank, (0, False)) for rank in peers.ranks}

    def _key(self) -> str:
        return f"{self._peers.scope}/unused/{self._at}"
