"""When ranks begin to compare which gradients they lack: simulated, with hosts that are backwards ahead of others."""

from __future__ import annotations

import functools
import json
import operator
import random
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from flatfsdp.engine.agreement.rank_exchange import RankExchange
from flatfsdp.engine.agreement.unused_params import UnusedParams
from flatfsdp.engine.watchdog.store import StoreGone
from flatfsdp.errors import LostRankError

pytestmark = pytest.mark.unit

PARAMETERS, BACKWARDS = 3, 8


class Waits(BaseException):
    """A rank waits for others."""


class Store:
    """What ranks leave for each other, and their alarms."""

    keeps_all = False  # also alarms that a rank raises again as it asks again, since it waits

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.alarms: list[str] = []

    def append(self, key: str, text: str) -> None:
        if text not in self.texts.get(key, ""):  # a rank that waits asks again
            self.texts[key] = self.texts.get(key, "") + text

    def read(self, key: str) -> str | None:
        return self.texts.get(key)

    def count(self, key: str, step: int = 1) -> int:
        number = int(self.texts.get(key, "0")) + step
        if step:
            self.texts[key] = str(number)
        return number

    def erase(self, *keys: str) -> None:
        for key in keys:
            del self.texts[key]

    def raise_alarm(self, alarm: str) -> None:
        if alarm not in self.alarms or self.keeps_all:
            self.alarms.append(alarm)

    def wait(self, complete: Any, seconds: float) -> bool:
        if not complete():
            raise Waits
        return True


class GoneStore(Store):
    """The process that served it has ended."""

    def wait(self, complete: Any, seconds: float) -> bool:
        raise StoreGone("gone")


def agreement_of(rank: int, world: int, store: Store, kind: type[UnusedParams] = UnusedParams) -> UnusedParams:
    """That of one rank."""
    peers = RankExchange()
    watch: Any = SimpleNamespace(store=store, waiting=lambda *args, **how: nullcontext())
    peers.rank, peers.ranks, peers.scope, peers.watch = rank, tuple(range(world)), "model", watch
    return kind(peers)


class Rank:
    """One rank, whose backward `k` begins at place 2k of the sequence and ends at the next one.

    Attributes:
        compared: by backward, whether it had a bitmap.
        absent: by backward, the parameters that it found no rank to have gradients of, of those that it lacks.
    """

    unused_class: type[UnusedParams] = UnusedParams

    def __init__(self, rank: int, store: Store, lacking: list[list[int]], ahead: int) -> None:
        self.unused = agreement_of(rank, len(lacking[0]), store, self.unused_class)
        self.compared: list[bool] = []
        self.absent: list[int] = []
        self.position = 0
        self._rank, self._store, self._lacking, self._ahead = rank, store, lacking, ahead
        self._found = 0

    def run(self, others: list[Rank]) -> Iterator[None]:
        """The main thread; goes on once for each step. No rank is further `ahead` of another than that."""
        for number, lacks in enumerate(self._lacking):
            while any(number > len(each.absent) + self._ahead for each in others):
                yield
            yield from self._waiting(lambda: self.unused.begin(self.position))
            self.position += 1
            yield
            self.compared.append(self.unused.compares)
            own, at = lacks[self._rank], self.position
            if own and not self.unused.compares:
                self.unused.reserve(at)
            self.position += 1
            yield
            if not own:
                self.absent.append(0)
            elif self.unused.compares:
                while any(len(each.compared) <= number for each in others):  # which have not come to the bitmap
                    yield
                self.absent.append(functools.reduce(operator.and_, lacks))
            else:
                yield from self._waiting(
                    lambda: self.unused.ask(self.position - 1, self._lacking[len(self.absent)][self._rank])
                )
                self.absent.append(self._found)

    def watch(self) -> None:
        """The watchdog reads alarms."""
        for alarm in [*self._store.alarms]:
            _, scope, at = json.loads(alarm)
            self.unused.consider(scope, at, self.position)

    def _waiting(self, step: Any) -> Iterator[None]:
        while True:
            try:
                self._found = step()
                return
            except Waits:
                yield


def problem_of(seed: int, rank_class: type[Rank] = Rank) -> str:
    """Ranks that lack what is drawn, in an order that is drawn; "" or what went wrong."""
    rng = random.Random(seed)
    world = rng.choice((2, 2, 3, 4))
    rate = rng.choice((0.1, 0.3, 0.8))
    lacking = [[rng.randrange(2**PARAMETERS) * (rng.random() < rate) for _ in range(world)] for _ in range(BACKWARDS)]
    store, ahead = Store(), rng.choice((0, 1, 3, 8))
    ranks = [rank_class(rank, store, lacking, ahead) for rank in range(world)]
    mains = {rank: rank.run(ranks) for rank in ranks}
    speeds = [rng.choice((0.1, 0.5, 1.0)) for _ in range(2 * world)]
    for _ in range(10**4):
        (at,) = rng.choices(range(2 * world), speeds)
        rank = ranks[at // 2]
        rank.watch() if at % 2 else next(mains[rank], None)
        if all(len(each.absent) == BACKWARDS for each in ranks):
            break
    else:
        return "they wait for ever"
    if any(each.compared != ranks[0].compared for each in ranks):
        return f"not all have the same bitmaps: {[each.compared for each in ranks]}"
    for number, lacks in enumerate(lacking):
        everywhere = functools.reduce(operator.and_, lacks)
        if any(each.absent[number] != everywhere for rank, each in enumerate(ranks) if lacks[rank]):
            return f"of {lacks} ranks take {[each.absent[number] for each in ranks]} for absent"
    for rank in ranks:  # the last ones that were asked look
        rank.unused.begin(10**4)
    return f"these stay: {store.texts}" if store.texts else ""


def test_all_ranks_begin_to_compare_in_the_same_backward() -> None:
    found = {seed: problem for seed in range(300) if (problem := problem_of(seed))}
    assert not found, found


def test_answers_that_are_lost_with_the_store_are_not_guessed() -> None:
    """A rank that took a missing answer for one of a rank that looks from the start on compared bitmaps alone."""
    unused = agreement_of(0, 2, GoneStore())
    assert unused.ask(1, 0b11) == 0  # the other one has ended, and lacked nothing
    with pytest.raises(LostRankError, match=r"is gone, and rank 1 did not report which parameters"):
        unused.begin(2)
    assert not unused.compares


def test_many_that_ask_raise_one_alarm() -> None:
    store = Store()
    store.keeps_all = True
    for rank in range(40):
        with pytest.raises(Waits):
            agreement_of(rank, 41, store).ask(1, 0b1)
    assert len(store.alarms) == 1


def test_they_do_begin() -> None:
    rank = Rank(0, Store(), [[1]] * BACKWARDS, 0)
    assert not [*rank.run([rank])][BACKWARDS * 3 :]
    assert rank.compared == [False] + [True] * (BACKWARDS - 1)


class AtOnce(UnusedParams):
    """From the next backward on, wherever others are."""

    def _learn(self, answers: dict[int, tuple[int, int]]) -> None:
        self._from = 0


class LooksLater(UnusedParams):
    """A rank that has answered goes on without a look at the other answers."""

    def begin(self, at: int) -> None:
        self.asked.clear()
        super().begin(at)


class AnswersForAll(UnusedParams):
    """The watchdog answers for a rank that is about to lack gradients itself."""

    def reserve(self, at: int) -> None:
        return


@pytest.mark.parametrize("wrong", [AtOnce, LooksLater, AnswersForAll])
def test_a_wrong_protocol_is_found_out(wrong: type[UnusedParams]) -> None:
    rank_class = type("Wrong", (Rank,), {"unused_class": wrong})
    assert any(problem_of(seed, rank_class) for seed in range(300))
