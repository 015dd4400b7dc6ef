"""What one rank lacked in its last backwards, as its watchdog answers other ranks that ask for it. [Note: unused]

The main thread and the watchdog share it, so it is behind a lock. It holds nothing of the model, which it outlives.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass

from ..watchdog.store import StoreClient

KEPT = 256  # backwards of which a rank can still answer for
_ENTRY = re.compile(r"(\d{1,18}):([0-9a-f]+):([01])")


@dataclass
class MissingGradients:
    """What this rank lacked in one backward."""

    kind: int  # of the backward
    lacking: int  # a bit for each parameter of the model
    is_published: bool  # in the store


class UnusedAnswers:
    """One rank's answers, for one model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: dict[int, MissingGradients] = {}  # by place in the sequence
        self._requested: set[int] = set()  # such places, to which this rank has yet to come
        self._heard: set[int] = set()  # of calls
        self._due: set[int] = set()  # kinds of backwards of which all take part in the next
        self._rank, self._scope = 0, ""
        self._store: StoreClient | None = None

    def connect(self, rank: int, scope: str, store: StoreClient) -> None:
        """There are other ranks, which may ask in `store`."""
        self._rank, self._scope, self._store = rank, scope, store

    def forget(self) -> None:
        """All ranks have abandoned an iteration: no next backward is due."""
        with self._lock:
            self._due.clear()

    # -- for the main thread -----------------------------------------------------------------------------------------

    def record(self, at: int, kind: int, lacking: int, *, takes_part: bool, relied: bool) -> bool:
        """What this rank lacked in the backward of this `kind` at this place; whether it takes part in a round, which
        others may have asked it to. `relied`: nobody waits for a rank that lacks what is expected."""
        with self._lock:
            takes_part = takes_part or at in self._requested or (not relied and kind in self._due)
            self._own[at] = MissingGradients(kind, lacking, is_published=takes_part)
            self._due.discard(kind)
            if self._requested:
                self._requested = {place for place in self._requested if place > at}
            if self._heard:
                self._heard = {place for place in self._heard if place >= at}
            if len(self._own) > KEPT:
                del self._own[next(iter(self._own))]
        return takes_part

    def take_part_in_next(self, kind: int) -> None:
        """Some ranks did not take part in a round: all do in the next backward of this `kind`."""
        with self._lock:
            self._due.add(kind)

    def has_heard(self, at: int) -> None:
        """This rank calls the others in the backward at this place."""
        with self._lock:
            self._heard.add(at)

    # -- for the watchdog --------------------------------------------------------------------------------------------

    def consider(self, scope: str, at: int, calls: bool) -> None:
        """A rank asks what this one lacks in the backward at this place, or `calls` it to answer."""
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
            hears = calls and at not in self._heard
            if hears:
                self._heard.add(at)
        if own is not None and answers:
            self._store.append(key, entry_of(self._rank, own.lacking, takes_part=False))
        if hears:
            self._store.append(f"{key}/heard", entry_of(self._rank, 0, takes_part=True))

    def publish_last_words(self) -> None:
        """This rank answers no more, for its model is gone or its program ends: leave what it would answer."""
        with self._lock:
            text = "".join(entry_of(at, own.lacking, takes_part=False) for at, own in self._own.items())
        if text and self._store is not None:
            self._store.post(f"{self._scope}/unused/left/{self._rank}", text)


def last_words_of(rank: int, at: int, scope: str, store: StoreClient) -> int | None:
    """What `rank`, which may have ended, lacked in the backward at this place; None if it has not left that."""
    left = entries_in(store.read(f"{scope}/unused/left/{rank}") or "")
    return left[at][0] if at in left else None


def entry_of(place: int, lacking: int, *, takes_part: bool) -> str:
    """What a rank, or the last words of one for a place, lacks, as text. `takes_part`: it did so itself."""
    return f"{place}:{lacking:x}:{int(takes_part)};"


def entries_in(text: str) -> dict[int, tuple[int, bool]]:
    """By rank, or by place, what is lacking; and whether the rank took part itself. [Note: trust]"""
    found = (_ENTRY.fullmatch(entry) for entry in text.split(";"))
    return {int(each[1]): (int(each[2], 16), each[3] == "1") for each in found if each is not None}
