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

from ...errors import AgreementError, fail, ranks_by_value
from ..base import _torch
from ..base.hashing import hash63
from ..comm.transport import Transport
from ..watchdog.regions import current_watch
from ..watchdog.store import PERIOD, StoreClient
from ..watchdog.watchdog import Watchdog
from .collective_calls import READING

NO_ANSWER = "does not answer"

# Models over the same ranks are distinguished by the order in which they first run, which all their ranks share.
_models: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


class RankExchange:
    """The ranks over which a model is spread.

    Attributes:
        axes: what exchanges run over, one after the other; none where this rank is alone.
        rank, ranks: this rank, and the global ranks that take part, once they have answered.
        scope: names this model in the store, the same on all its ranks; "" where there is no other rank.
        watch: the watchdog where there is another rank, else None.
        verdict: why nothing goes on, the ranks having diverged; None as long as they have not.
        was_raised: the main thread has raised that.
    """

    def __init__(self) -> None:
        self.axes: Sequence[Transport] = ()
        self.rank = 0
        self.ranks: tuple[int, ...] = ()
        self.scope = ""
        self.watch: Watchdog | None = None
        self.verdict: AgreementError | None = None
        self.was_raised = False
        self._exchanges = 0

    def spread_over(self, axes: Sequence[Transport]) -> None:
        """Exchange over `axes` from now on."""
        self.axes = axes
        if axes:
            self.rank = axes[0].group.ranks[axes[0].group.rank]

    def know(self, ranks: Sequence[int]) -> Watchdog:
        """These ranks have answered: notes may be left for them, in the watchdog that this returns."""
        self.ranks = tuple(sorted(ranks))
        self.scope = f"{hash63(str(self.ranks)):x}.{next(_models[self.ranks])}"
        self.watch = current_watch()
        return self.watch

    @property
    def is_first(self) -> bool:
        """Whether this rank is the lowest of those that have answered, or the only one."""
        return self.rank == min(self.ranks, default=self.rank)

    @property
    def time_limit(self) -> float:
        """Seconds that the process groups give an operation."""
        return max((_torch.time_limit(axis.group.process_group) for axis in self.axes), default=0.0)

    @property
    def store(self) -> StoreClient:
        """Where notes are left. Precondition: there is another rank."""
        assert self.watch is not None
        return self.watch.store

    # -- exchanges ---------------------------------------------------------------------------------------------------

    def exchange(self, code: int, extra: int = 0, *more: int) -> dict[int, list[int]] | None:
        """Every rank's numbers, as many on each, None where process groups move nothing. Collective over all axes; the
        ops of a sequence are always of one size."""
        self._exchanges += 1
        block = torch.tensor([self.rank, code, extra, *more], device=self.axes[0].device.device)
        for axis in self.axes:
            block = axis.gather_now(block)
        if any(axis.group.backend == "fake" for axis in self.axes):
            return None
        return {rank: numbers for rank, *numbers in block.view(-1, 3 + len(more)).tolist()}

    def numbers_of_ranks(self, code: int, extra: int = 0, *more: int) -> dict[int, list[int]]:
        """Every rank's numbers; this rank's own where there is no other. Collective over all axes."""
        answers = self.exchange(code, extra, *more) if self.axes else None
        return {self.rank: [code, extra, *more]} if answers is None else answers

    def publish(self, text: str, codes: dict[int, int]) -> dict[tuple[int, ...], str]:
        """The texts of ranks whose codes differ, by the ranks that share one. All ranks call it."""
        notes, place = self.store, f"{self.scope}/x{self._exchanges}"
        notes.post(f"{place}/{self.rank}", text)
        texts: dict[tuple[int, ...], str] = {}
        for ranks in ranks_by_value(dict(sorted(codes.items()))).values():
            key = f"{place}/{ranks[0]}"
            found = notes.wait(functools.partial(notes.read, key), 10 * PERIOD)
            texts[tuple(ranks)] = found or NO_ANSWER
        notes.let_all_read(place, len(self.ranks), READING)
        return texts

    # -- the verdict -------------------------------------------------------------------------------------------------

    def fail_with(self, error: AgreementError) -> NoReturn:
        """The ranks have diverged, and `error` describes how: raise it here, and with every later step."""
        self.verdict = error
        self.was_raised = True
        fail(error)

    def raise_verdict(self, cause: BaseException | None = None) -> None:
        """Raise the verdict if there is one."""
        if self.verdict is not None:
            self.was_raised = True
            raise self.verdict from cause

    def give_up(self, error: AgreementError, ranks: Sequence[int] | None) -> bool:
        """Go on with nothing that needs one of `ranks` (None: any other), because of `error`; whether that is so."""
        concerned = ranks is None or not set(ranks).isdisjoint(self.ranks)
        if concerned and self.verdict is None:
            self.verdict = error
        return concerned
