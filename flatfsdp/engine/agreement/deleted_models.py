"""Answers to other ranks for a model that this rank has deleted.

[Note: deleted models] A rank continues without a note if its op was expected; if another rank's op was not, its watch
leaves the note later ([Note: agreement]). The watch outlives the model, and so do the last ops, which it keeps: it also
answers when the model is deleted, until the process group is destroyed. Then it leaves only what ranks may still ask
that have not erred: that this one has computed all gradients of its last backward ([Note: unused]).
"""

from __future__ import annotations

from collections import deque

from ..base.foreign_text import parse
from ..watchdog.status_report import Progress
from .collective_calls import come
from .ops import Op
from .rank_exchange import RankExchange
from .unused_params import answer, left_at


class PastOps:
    """The last ops of one rank with one model, which it does not reference."""

    def __init__(
        self,
        peers: RankExchange,
        logged: deque[tuple[int, Op, int]],
        progress: Progress,
        *,
        noted_at: deque[int],
        answered: set[int],
    ) -> None:
        """`logged`: (position, op, step) of each; `noted_at`: where this rank left a note; `answered`: where it has
        answered ranks that lack gradients."""
        self._rank, self._ranks, self._scope, self._store = peers.rank, peers.ranks, peers.scope, peers.store
        self._logged, self._progress, self._noted_at, self._answered = logged, progress, noted_at, answered

    def consider(self, alarm: str) -> bool:
        """Answer the alarm of a rank, if it concerns this model, which was deleted."""
        match parse(alarm):
            case ["unused", str(scope), int(at)] if scope == self._scope and at < self._position:
                if at not in self._answered:
                    self._answered.add(at)
                    answer(self._store, scope, at, self._rank, 0, self._position)
            case [str(scope), int(at), _] if scope == self._scope and at not in self._noted_at:
                self._noted_at.append(at)
                op, prefix = self._op_at(at), f"{scope}/{at}"
                self._store.post(f"{prefix}/note/{self._rank}", op.to_text())
                come(self._store, prefix, str(op.code), len(self._ranks))
        return True

    def publish(self) -> None:
        """The watch ends: leave the position that this rank has reached."""
        if self._progress.backwards:
            self._store.post(left_at(self._scope, self._rank), str(self._position))

    @property
    def _position(self) -> int:
        return self._logged[-1][0] + 1 if self._logged else 0

    def _op_at(self, at: int) -> Op:
        """The op at position `at`, or what this rank did instead."""
        for position, op, _ in self._logged:
            if position == at:
                return op
        passed = "passed this point long ago and " if self._position > at else ""
        return Op(-1, f"{passed}deleted its model")
