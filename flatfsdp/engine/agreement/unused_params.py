"""The agreement on parameters that no rank computed a gradient for, whose `.grad` then stays unchanged.

[Note: unused] A rank knows for which parameters it computed gradients, over all microbatches that are reduced together.
A rank that computed all of them needs no information about the others. A rank that lacks some has to know whether
another rank computed them: the reduced value may be 0 in either case.

Behind the last reduction of a backward ranks reduce a *bitmap*: a byte for each parameter, 1 on a rank that computed
its gradient, of which each rank gets the maximum. Only ranks that lack gradients wait for it. As long as no rank has
lacked any, there is no bitmap. All ranks know when the first one follows:

- In a model's first backward of a kind, ranks compare its last op in an exchange ([Note: agreement]), and whether any
  of them lacks gradients: then they reduce a bitmap, in this backward and in all later ones.
- So they do once stand-ins replace batches, which all ranks know ([Note: uneven inputs]).
- A rank that lacks some in a backward without a bitmap *asks*: it leaves its bits in the store, and the first one there
  raises an alarm. The watchdogs of ranks past that position answer that these lack nothing, and from which position on
  they look before they begin a backward: on accelerators they may be several backwards ahead. The main threads of ranks
  that lack some answer with their bits. A rank that looks waits for all answers. Backwards that begin at the latest of
  these positions, or later, have a bitmap: no rank has begun one of them before it looked. The last rank that has
  looked erases the answers.

If the store is gone answers may be missing: those of ranks that lacked nothing and have ended their program. A rank
that asks in the last backward needs no more than that. A further backward is refused, since this rank cannot know
whether the others compare bitmaps in it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import re
import time

import torch

from ...errors import AgreementError, LostRankError, ranks_in_words
from ..base.wait_limits import blocked
from ..device.streams import Work
from ..transports.blocking import start_maximum
from ..watchdog.status_report import server_ended
from ..watchdog.store import PERIOD, StoreClient, StoreGone, where_it_was
from ..watchdog.watchdog import PATIENCE
from .rank_exchange import RankExchange

_WHAT = "the other ranks to report which parameters they have no gradients for"
_ANSWER = re.compile(r"(\d{1,18}):([0-9a-f]+):(\d{1,18})")


class UnusedParams:
    """One rank's side of the agreement on parameters without gradients on any rank, for one model.

    Attributes:
        count: the number of parameters of the model.
        compares: whether backwards end with a bitmap.
        asked: positions at which a rank has asked, and whose answers this rank has to look at.
        answered: positions at which this rank has answered, or is about to.
    """

    def __init__(self, peers: RankExchange) -> None:
        self.count = 0
        self.compares = False
        self._peers = peers
        self._ones: list[torch.Tensor] = []  # the bitmap of a rank that lacks nothing, for each axis
        self._looks_from = 0  # no backward before this position of the sequence begins after an answer
        self.asked: list[int] = []
        self.answered: set[int] = set()
        self._from = math.inf  # the position from which on backwards have a bitmap
        self._works: list[Work] = []  # of the last bitmap, of a rank that did not wait for it

    def begin(self, at: int) -> None:
        """A backward begins, at this position of the sequence. Waits for the last bitmap.

        Raises:
            LostRankError: the store is gone, and with it the answers of other ranks.
        """
        if self._works:
            with blocked():
                while self._works:
                    self._works.pop().wait()
        if not self.compares:
            self._looks_from = at + 1  # before `asked` is read; the watchdog writes and reads in the opposite order
        while self.asked:
            answers = self._answers(self.asked[0])
            missing = [rank for rank in self._peers.ranks if rank not in answers and rank != self._peers.rank]
            if missing and not self.compares:
                raise LostRankError(
                    f"the store of the process group{where_it_was()} is gone, and {ranks_in_words(missing)} did not "
                    "report which parameters they had no gradients for: this rank cannot know whether ranks compare "
                    f"that from now on. {server_ended()}"
                )
            if not missing:
                self._learn(answers)
            self.asked.pop(0)
        self.compares = self.compares or at >= self._from

    # -- the bitmap --------------------------------------------------------------------------------------------------

    def lacked_by_all(self, lacking: int) -> int:
        """Those parameters, of the ones that this rank is `lacking` a gradient for, that all ranks lack: a bit each.
        Collective over all axes; waits only if this rank lacks some."""
        axes = self._peers.axes
        if not lacking:
            if not self._ones:
                self._ones = [torch.ones(self.count, dtype=torch.uint8, device=axis.device.device) for axis in axes]
            self._works = [start_maximum(axis, ones) for axis, ones in zip(axes, self._ones, strict=True)]
            if self._peers.watch is not None:  # ones are the maximum; others still need them if this process ends now
                self._peers.watch.outlast(self._works)
            return 0
        came = [1 - (lacking >> index & 1) for index in range(self.count)]
        bitmap = torch.tensor(came, dtype=torch.uint8, device=axes[0].device.device)
        with blocked():
            for axis in axes:
                start_maximum(axis, bitmap).wait()
            return sum((not used) << index for index, used in enumerate(bitmap.tolist()))

    # -- without a bitmap --------------------------------------------------------------------------------------------

    def reserve(self, at: int) -> None:
        """This rank is about to ask about the backward that ends at this position, or to answer itself."""
        self.answered.add(at)

    def ask(self, at: int, lacking: int) -> int:
        """`lacked_by_all` of a backward without a bitmap, which has ended at this position. Waits for the answers."""
        peers = self._peers
        with contextlib.suppress(StoreGone):
            answer(peers.store, peers.scope, at, peers.rank, lacking, self._looks_from)
            there = [*_answers_in(peers.store.read(self._key(at)) or "")]
            if there[:1] == [peers.rank] and len(there) < len(peers.ranks):  # one alarm for all that ask
                peers.store.raise_alarm(json.dumps(["unused", peers.scope, at]))
        answers = self._answers(at)
        if len(answers) == len(peers.ranks):
            self._learn(answers)
        else:  # a rank whose answer is missing lacked nothing, and has ended its program
            self.asked.append(at)
            return 0
        return functools.reduce(operator.and_, (lacks for lacks, _ in answers.values()), lacking)

    def consider(self, scope: str, at: int, position: int) -> bool:
        """Answer a rank that has asked about the backward at `at`, if this one, at this `position` of the sequence, is
        past it; False if it is not. Called by the watchdog."""
        if scope != self._peers.scope or at in self.answered:
            return True
        if position <= at:
            return False
        self.answered.add(at)
        self.asked.append(at)
        answer(self._peers.store, scope, at, self._peers.rank, 0, self._looks_from)
        return True

    def _learn(self, answers: dict[int, tuple[int, int]]) -> None:
        self._from = min(self._from, max(looks_from for _, looks_from in answers.values()))

    def _answers(self, at: int) -> dict[int, tuple[int, int]]:
        """For each rank the bits that it lacked in the backward at this position, and the position from which on it
        looks. Waits for all ranks; some are missing if the store is gone."""
        peers = self._peers
        assert peers.watch is not None
        store, looks_at = peers.store, time.monotonic() + PERIOD
        found: dict[int, tuple[int, int]] = {}

        def complete() -> bool:
            nonlocal looks_at
            peers.raise_verdict()
            found.update(_answers_in(store.read(self._key(at)) or ""))
            missing = [rank for rank in peers.ranks if rank not in found]
            if missing and time.monotonic() > looks_at:
                looks_at = time.monotonic() + PERIOD
                for rank in missing:  # its watch may have ended
                    if (last := store.count(left_at(peers.scope, rank), 0)) > at:
                        found[rank] = 0, last
            return not missing

        with (
            peers.watch.waiting(peers.ranks, f"waits for {_WHAT}", ends_by_notes=True),
            contextlib.suppress(StoreGone),
        ):
            if not store.wait(complete, PATIENCE):
                missing = [rank for rank in peers.ranks if rank not in found]
                raise AgreementError(
                    f"waited {PATIENCE:.0f} s for {_WHAT}: no answer from {ranks_in_words(missing)}. Find out what "
                    "stopped the processes of these ranks"
                )
            if store.count(f"{self._key(at)}/read") == len(peers.ranks):
                store.erase(self._key(at), f"{self._key(at)}/read")
        return {rank: found[rank] for rank in peers.ranks if rank in found}

    def _key(self, at: int) -> str:
        return _key(self._peers.scope, at)


def answer(store: StoreClient, scope: str, at: int, rank: int, lacking: int, looks_from: int) -> None:
    """Answer that `rank` is `lacking` these gradients in the backward of model `scope` that has ended at this
    position."""
    store.append(_key(scope, at), f"{rank}:{lacking:x}:{looks_from};")


def left_at(scope: str, rank: int) -> str:
    """The key of the position that `rank` had reached when its watch ended."""
    return f"{scope}/unused/left/{rank}"


def _key(scope: str, at: int) -> str:
    return f"{scope}/unused/{at}"


def _answers_in(text: str) -> dict[int, tuple[int, int]]:
    """(lacking bits, the position from which on it looks) of all answers in `text`, by rank. [Note: trust]"""
    found = (_ANSWER.fullmatch(each) for each in text.split(";"))
    return {int(each[1]): (int(each[2], 16), int(each[3])) for each in found if each is not None}
