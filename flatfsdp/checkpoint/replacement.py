"""A new folder in the place of an old one, step by step; after each step all ranks know that all have done it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from ..errors import CheckpointError
from .disk import disk
from .folders import CheckpointFolder, leader_of
from .lock import Lock
from .ranks import CheckpointRanks

T = TypeVar("T")


class Replacement:
    """One save or export. [Note: siblings]

    Attributes:
        ranks: those that write.
        place: where.
        doing: what they do, for messages.
        lock: of the place, which the rank takes that acts on folders. [Note: lock]
        leader: the rank that acts on folders for this one; known in `run`.
    """

    leader: int

    def __init__(self, ranks: CheckpointRanks, place: CheckpointFolder, doing: str) -> None:
        self.ranks = ranks
        self.place = place
        self.doing = doing
        self.lock = Lock(place.path)

    @property
    def leads(self) -> bool:
        """Whether this rank acts on folders."""
        return self.leader == self.ranks.rank

    def all(self, work: Callable[[], T]) -> list[T]:
        """Let every rank do its `work`. Collective."""
        return self.ranks.exchange(self.doing, work)

    def lead(self, work: Callable[[], T]) -> list[T | None]:
        """Let those that lead do this. Collective."""
        return self.all(lambda: work() if self.leads else None)

    def run(self, prepare: Callable[[], object], fill: Callable[[], T], *, per_node: bool = False) -> T:
        """Let what `fill` writes into `place.new`, which `prepare` makes, take its place; what `fill` returned.
        Collective, as those are.

        Raises:
            CheckpointError: on every rank; there is what was there before.
        """
        self.leader = leader_of(self.place, self.ranks, self.doing, per_node=per_node)
        try:
            prepare()
            try:
                filled = fill()
            except CheckpointError:
                if self.leads:
                    with contextlib.suppress(OSError, CheckpointError):  # a full disk gets back what was written
                        self.lock.check()
                        self.place.discard(self.place.new)
                raise
            self.lead(self._swap)
            self.lead(self.place.drop_old)
            return filled
        finally:
            self.lock.release()

    def publish(self, data: bytes) -> None:
        """Make the new folder complete, by its marker with these contents."""
        self.lock.check()
        disk().publish(self.place.new / self.place.marker, data)

    def _swap(self) -> None:
        self.lock.check()
        self.place.swap()
