"""Ranks of one process, and the store in which they meet after an iteration was abandoned."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from flatfsdp.engine.agreement import collective_calls, op_sequence
from flatfsdp.engine.agreement.op_sequence import OpSequence
from flatfsdp.engine.agreement.ops import Op
from flatfsdp.engine.agreement.rank_exchange import RankExchange
from flatfsdp.engine.agreement.turns import ModelOrder
from flatfsdp.engine.agreement.unused_params import UnusedParams
from flatfsdp.engine.base.events import EventLog
from flatfsdp.engine.comm.comm_stats import CommStats
from flatfsdp.engine.watchdog.store import StoreClient
from flatfsdp.engine.watchdog.watchdog import Watchdog
from flatfsdp.errors import AgreementError, LostRankError

pytestmark = pytest.mark.unit

RANKS = (0, 1)


class Rank(OpSequence):
    """The sequence of one rank, and the collectives that it counts."""

    def __init__(self, peers: RankExchange) -> None:
        super().__init__(peers)
        self.counted = CommStats()
        self.follow(self.counted, EventLog())


@pytest.fixture
def ranks() -> Any:
    """The sequences of two ranks, which have both begun a backward. When one waits, the watchdog of the other reads its
    alarms."""
    store, alarms = StoreClient(dist.HashStore()), list[str]()
    found: list[Rank] = []
    store.raise_alarm = alarms.append  # type: ignore[assignment, method-assign]

    def waiting(rank: int) -> Any:
        for alarm in alarms:
            found[1 - rank].consider(alarm)
        return nullcontext()

    for rank in RANKS:
        peers = RankExchange()
        watch: Any = SimpleNamespace(store=store, waiting=lambda *args, rank=rank, **how: waiting(rank))
        peers.rank, peers.ranks, peers.scope, peers.watch = rank, RANKS, "model", watch
        peers.exchange = lambda code, *more: {rank: [code, 0] for rank in RANKS}  # type: ignore[method-assign]
        sequence = Rank(peers)
        sequence.start("a backward")
        sequence.next(Op(1, "began a backward"))
        found.append(sequence)
    with patch.object(op_sequence, "PATIENCE", 0.5):
        yield found


def test_what_was_abandoned_is_noted_once(ranks: list[Rank]) -> None:
    """A failed backward inside of a forward fails that, too: two notes of one rank were taken for those of two."""
    for _ in RANKS:
        ranks[0].publish_abandoned(ZeroDivisionError())
    with pytest.raises(AgreementError, match=r"rank 0 abandoned .*; rank 1 has not reached this point"):
        ranks[0].meet_abandoned()


def test_a_rank_that_waits_for_gathers_of_one_that_has_ended_its_backward_reports_that(ranks: list[Rank]) -> None:
    """Where no gradients come, and the other reached fewer units: both waited long."""
    ranks[1].counted.issued += 1
    with pytest.raises(AgreementError, match=r"rank 0 gathered less; rank 1 went on in a backward"):
        ranks[0].show(Op(2, "gathered less"), issued=ranks[0].issued)


@pytest.mark.parametrize("reduces", [True, False])
def test_a_rank_that_ends_a_backward_has_not_gone_on_after_one_that_left_the_loop_around_it(
    ranks: list[Rank], reduces: bool
) -> None:
    """It had done the last op, and was still in the part whose collectives the other rank did not count any more."""
    for each in ranks:
        each.counted.issued += 2
        if reduces:
            each.next(Op(3, "issued"), completes=True, ends=True, then=1)
            each.counted.issued += 1
        else:
            each.meetings.meet = lambda *args: None  # type: ignore[method-assign]
            each.show(Op(3, "gathered"), issued=each.issued)
            del each.meetings.meet
    late, early = ranks
    for each in early, late:
        if each is late:
            late.consider(json.dumps(["model", early.position, early.issued]))
        each.rest()
        each.start("the loop")
        each.publish_abandoned(ValueError("enough"))
    for each in ranks:
        each.meet_abandoned()
    assert [each.position for each in ranks] == [3, 3]


def test_models_over_two_groups_meet_in_each_of_them() -> None:
    """Replicas of HYBRID_SHARD ran several models: rank 2 was taken for rank 1, so that others waited forever."""
    store = StoreClient(dist.HashStore())
    watch: Any = SimpleNamespace(
        store=store, waiting=lambda *args, **how: nullcontext(), add=Mock(), follow=Mock(), progress_with_living=dict
    )
    turns = {}
    for rank in range(4):
        model = RankExchange()
        model.rank, model.ranks, model.scope, model.watch = rank, tuple(range(4)), "model", watch
        axis: Any = SimpleNamespace(ranks=(0, 1) if rank < 2 else (2, 3))
        turns[rank] = ModelOrder(axis, model, 0, {})
    with patch.object(op_sequence, "PATIENCE", 0.5):
        turns[2].meetings.announce(0, Op(1, "began a forward"))
        with pytest.raises(AgreementError, match="rank 0 began a forward; rank 1 has not reached this point"):
            turns[0].take(Op(1, "began a forward"))


def test_a_call_that_begins_after_the_watch_was_abandoned_fails_at_once() -> None:
    """A rank that was lost before the first forward: the others met there, and waited until they counted as lost."""
    watch = Watchdog(StoreClient(dist.HashStore()), rank=0, world=2)
    watch.abandon(LostRankError("rank 1 is lost"))
    with (
        patch.object(collective_calls, "current_watch", lambda: watch),
        patch.object(collective_calls, "PATIENCE", 0.5),
        patch.object(collective_calls, "READING", 0.1),
        patch.object(dist, "get_backend_config", lambda group: "gloo"),
        patch.object(dist, "get_rank", lambda: 0),
    ):
        for _ in range(2):  # nor does the one after it complete
            with pytest.raises(LostRankError, match="rank 1 is lost"):
                collective_calls.meet(None, RANKS, "compares its model")
    watch.close()


def test_what_a_watch_keeps_of_bitmaps_keeps_no_process_group() -> None:
    peers = RankExchange()
    unused = UnusedParams(peers)
    diverged, gone = unused.diverged, weakref.ref(peers)
    peers.verdict = AgreementError("ranks diverged")
    assert diverged()
    del peers, unused
    gc.collect()
    assert gone() is None
    assert not diverged()
