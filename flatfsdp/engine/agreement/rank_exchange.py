"""The other ranks of a model, as one rank sees them: exchanges of fixed size, and words where an exchange shows a
difference.

Process groups that move nothing (torch's fake ones) issue the same collectives and compare nothing: there is no other
rank.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch

from ...errors import AgreementError, fail
from ..base import _torch
from ..base.hashing import hash63
from ..comm.transport import Transport
from ..watchdog import store as board
from ..watchdog.store import StoreClient
from ..watchdog.watchdog import Watchdog, current_watch

NO_ANSWER = "does not answer"

# Models over the same ranks are told apart by the order in which they first run, which all their ranks share.
_models: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


class RankExchange:
    """The ranks over which a model is spread.

    Attributes:
        ranks: the global ranks that take part, once they have been heard from.
        busy: whether this rank is inside an iteration, where it may wait for others.
    """

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        self.busy = False
        self._rank = 0
        self._axes: list[Transport] = []
        self._watch: Watchdog | None = None  # where there is another rank to hear from
        self._scope = ""  # names this model in the store
        self._exchanges = 0
        self._verdict: AgreementError | None = None  # the ranks have parted: nothing goes on
        self._was_raised = False  # the main thread has raised it

    def _over(self, axes: list[Transport]) -> None:
        """Exchange over `axes` from now on, one after the other; none where this rank is alone."""
        self._axes = axes
        if axes:
            self._rank = axes[0].group.ranks[axes[0].group.rank]

    @property
    def scope(self) -> str:
        """Names this model in the store, the same on all its ranks; "" where there is no other to hear from."""
        return self._scope

    @property
    def is_first(self) -> bool:
        """Whether this rank is the lowest of those that were heard from, or the only one."""
        return self._rank == min(self.ranks, default=self._rank)

    @property
    def time_limit(self) -> float:
        """Seconds that the process groups give an operation."""
        return max((_torch.time_limit(axis.group.process_group) for axis in self._axes), default=0.0)

    def _know(self, ranks: Sequence[int]) -> Watchdog:
        """These ranks have answered: notes may be left for them, in the watch that this returns."""
        self.ranks = tuple(sorted(ranks))
        self._scope = f"{hash63(str(self.ranks)):x}.{next(_models[self.ranks])}"
        self._watch = current_watch()
        return self._watch

    def _exchange(self, code: int, extra: int = 0) -> dict[int, tuple[int, int]] | None:
        """Every rank's two numbers, None where process groups move nothing. Collective, always of one size."""
        self._exchanges += 1
        block = torch.tensor([self._rank, code, extra], device=self._axes[0].device.device)
        for axis in self._axes:
            block = axis.gather_now(block)
        if any(axis.group.backend == "fake" for axis in self._axes):
            return None
        return {rank: (code, extra) for rank, code, extra in block.view(-1, 3).tolist()}

    def _publish(self, text: str, codes: dict[int, int]) -> dict[tuple[int, ...], str]:
        """The texts of ranks whose codes differ, by the ranks that share one. All ranks call it."""
        notes, place = self._store, f"{self._scope}/x{self._exchanges}"
        notes.post(f"{place}/{self._rank}", text)
        alike: dict[int, list[int]] = {}
        for rank in sorted(codes):
            alike.setdefault(codes[rank], []).append(rank)
        texts: dict[tuple[int, ...], str] = {}
        for ranks in alike.values():
            key = f"{place}/{ranks[0]}"
            found = notes.wait(functools.partial(notes.read, key), 10 * board.PERIOD)
            texts[tuple(ranks)] = found or NO_ANSWER
        self._let_all_read(place)
        return texts

    def _fail(self, error: AgreementError) -> NoReturn:
        self._verdict = error
        self._was_raised = True
        fail(error)

    @property
    def _store(self) -> StoreClient:
        assert self._watch is not None
        return self._watch.store

    def _let_all_read(self, place: str) -> None:
        """Give the others time to read, before an error ends this process and perhaps the store with it."""
        notes = self._store
        notes.count(f"{place}/read")
        notes.wait(lambda: notes.count(f"{place}/read", 0) >= len(self.ranks), 2.5 * board.PERIOD)

    def _raise_verdict(self, cause: BaseException | None = None) -> None:
        if self._verdict is not None:
            self._was_raised = True
            raise self._verdict from cause
