"""Meetings of ranks in the store, where one of them did not expect what it is about to do.

A rank leaves a note of its op at its place in the sequence, and waits for those of the others: if all are the same it
is a new order, else an error that quotes them all. [Note: agreement]
"""

from __future__ import annotations

import json
from collections import deque

from ...errors import AgreementError, LostRankError, ranks_by_value
from ..watchdog.status_report import ExitRecord, in_one_sentence
from ..watchdog.watchdog import PATIENCE
from .collective_calls import DIFFERENT, SAME, come, erase, let_all_read, texts_at
from .divergence import ModelNames, divergence
from .ops import Op
from .rank_exchange import RankExchange


class Meetings:
    """One rank's side of the meetings of one model.

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
        notes.post(f"{place}/says/{self._peers.rank}", op.to_text(self.required))
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
        with peers.watch.waiting(peers.ranks, what, settled_by_notes=True):
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
        let_all_read(peers.store, place, len(peers.ranks))
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
