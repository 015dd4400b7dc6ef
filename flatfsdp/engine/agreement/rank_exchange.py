"""Exchanges of one rank with the other ranks of a model: of fixed size, followed by descriptions if there is a
difference.

With fake process groups the same collectives are issued, but there is no other rank, and nothing is compared.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch

from ...errors import AgreementError, fail, ranks_by_value
from ..base import _torch
from ..base.hashing import hash63
from ..comm.transport import Transport
from ..transports.blocking import gather_now
from ..watchdog.regions import current_watch
from ..watchdog.store import PERIOD, StoreClient
from ..watchdog.watchdog import Watchdog
from .collective_calls import READING

NO_ANSWER = "does not answer"

# Models over the same ranks are distinguished by the order in which they first run, which is the same on all ranks. In
# another default process group, the same numbers may stand for other processes.
_models: weakref.WeakKeyDictionary[Watchdog, defaultdict[tuple[int, ...], Iterator[int]]] = weakref.WeakKeyDictionary()


class RankExchange:
    """The ranks over which a model is distributed.

    Attributes:
        axes: the axes of exchanges, used one after the other; none if this rank is alone.
        gathers: the transports of gathers, which may have process groups of their own.
        beside: those of other models that run in turns with this one, and fail with it.
        rank, ranks: this rank, and all global ranks of the model, once they have answered.
        scope: the name of this model in the store, the same on all its ranks; "" if there is no other rank.
        watch: the watchdog; None if there is no other rank.
        verdict: the error with which the ranks have diverged; None as long as they have not.
        was_raised: whether the main thread has raised the verdict.
    """

    def __init__(self) -> None:
        self.axes: Sequence[Transport] = ()
        self.gathers: Sequence[Transport] = ()
        self.beside: weakref.WeakSet[RankExchange] = weakref.WeakSet()
        self.rank = 0
        self.ranks: tuple[int, ...] = ()
        self.scope = ""
        self.watch: Watchdog | None = None
        self.verdict: AgreementError | None = None
        self.was_raised = False
        self._exchanges = 0

    def spread_over(self, axes: Sequence[Transport]) -> None:
        """Set the axes of exchanges."""
        self.axes = axes
        if axes:
            self.rank = axes[0].group.ranks[axes[0].group.rank]

    def know(self, ranks: Sequence[int]) -> Watchdog:
        """Record that these ranks have answered, so that notes may be left for them. Returns the watchdog."""
        self.ranks = tuple(sorted(ranks))
        self.watch = current_watch()
        known = _models.setdefault(self.watch, defaultdict(itertools.count))
        self.scope = f"{hash63(str(self.ranks)):x}.{next(known[self.ranks])}"
        return self.watch

    @property
    def is_first(self) -> bool:
        """Whether this rank is the lowest of those that have answered, or the only one."""
        return self.rank == min(self.ranks, default=self.rank)

    @property
    def time_limit(self) -> float:
        """The timeout of the process groups, in seconds."""
        return max((_torch.time_limit(axis.group.process_group) for axis in self.axes), default=0.0)

    @property
    def store(self) -> StoreClient:
        """The store of the notes. Precondition: there is another rank."""
        assert self.watch is not None
        return self.watch.store

    # -- exchanges ---------------------------------------------------------------------------------------------------

    def exchange(self, code: int, extra: int = 0, *more: int) -> dict[int, list[int]] | None:
        """Every rank's numbers, equally many on each; None with fake process groups. Collective over all axes; for ops
        of a sequence always with the same size."""
        self._exchanges += 1
        block = torch.tensor([self.rank, code, extra, *more], device=self.axes[0].device.device)
        for axis in self.axes:
            block = gather_now(axis, block)
        if any(axis.group.backend == "fake" for axis in self.axes):
            return None
        return {rank: numbers for rank, *numbers in block.view(-1, 3 + len(more)).tolist()}

    def numbers_of_ranks(self, code: int, extra: int = 0, *more: int) -> dict[int, list[int]]:
        """Every rank's numbers; only this rank's if there is no other. Collective over all axes."""
        answers = self.exchange(code, extra, *more) if self.axes else None
        return {self.rank: [code, extra, *more]} if answers is None else answers

    def publish(self, text: str, codes: dict[int, int]) -> dict[tuple[int, ...], str]:
        """The texts of ranks whose codes differ, by groups of ranks with equal codes. Called on all ranks."""
        notes, prefix = self.store, f"{self.scope}/x{self._exchanges}"
        notes.post(f"{prefix}/{self.rank}", text)
        texts: dict[tuple[int, ...], str] = {}
        for ranks in ranks_by_value(dict(sorted(codes.items()))).values():
            key = f"{prefix}/{ranks[0]}"
            found = notes.wait(functools.partial(notes.read, key), 10 * PERIOD)
            texts[tuple(ranks)] = found or NO_ANSWER
        notes.let_all_read(prefix, len(self.ranks), READING)
        return texts

    # -- the verdict -------------------------------------------------------------------------------------------------

    def fail_with(self, error: AgreementError) -> NoReturn:
        """Set the verdict to `error`, which describes the divergence: raise it now, and in every later step."""
        self.decide(error)
        self.was_raised = True
        fail(error)

    def decide(self, error: AgreementError) -> None:
        """Set the verdict to `error`, also for models that run in turns with this one: its collectives, of which ranks
        may have issued different ones, are matched with theirs."""
        self.verdict = error
        for each in list(self.beside):
            each.verdict = each.verdict or error

    def raise_verdict(self, cause: BaseException | None = None) -> None:
        """Raise the verdict if there is one."""
        if self.verdict is not None:
            self.was_raised = True
            raise self.verdict from cause

    def give_up(self, error: AgreementError, ranks: Sequence[int] | None) -> bool:
        """Set the verdict to `error` if this model needs one of `ranks` (None: any other); returns whether it does."""
        concerned = ranks is None or not set(ranks).isdisjoint(self.ranks)
        if concerned and self.verdict is None:
            self.decide(error)
        return concerned
