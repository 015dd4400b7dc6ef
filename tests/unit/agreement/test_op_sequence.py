"""Ranks of one process, and the store in which they meet after an iteration was abandoned."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from flatfsdp.engine.agreement import op_sequence
from flatfsdp.engine.agreement.op_sequence import OpSequence
from flatfsdp.engine.agreement.ops import NONE_CAME, Op
from flatfsdp.engine.agreement.rank_exchange import RankExchange
from flatfsdp.engine.watchdog.store import StoreClient
from flatfsdp.errors import AgreementError

RANKS = (0, 1)


@pytest.fixture
def ranks() -> Any:
    """The sequences of two ranks, which have both begun a backward."""
    store, found = StoreClient(dist.HashStore()), []
    for rank in RANKS:
        peers = RankExchange()
        watch: Any = SimpleNamespace(store=store, waiting=lambda *args, **how: nullcontext())
        peers.rank, peers.ranks, peers.scope, peers.watch = rank, RANKS, "model", watch
        peers.exchange = lambda code, *more: {rank: [code, 0] for rank in RANKS}  # type: ignore[method-assign]
        sequence = OpSequence(peers)
        sequence.start("a backward")
        sequence.next(Op(1, "began a backward"))
        found.append(sequence)
    with patch.object(op_sequence, "PATIENCE", 0.5):
        yield found


def test_a_rank_may_meet_the_others_after_they_have_met_and_gone_on(ranks: list[OpSequence]) -> None:
    """Where both announced that no gradients come, and failed: the first erased what the second had not read."""
    for each in ranks:
        each.announce(NONE_CAME)
        each.publish_abandoned(ZeroDivisionError())
        each.rest()
    for each in ranks:
        each.meet_abandoned()
    assert [each.position for each in ranks] == [3, 3]


def test_what_was_abandoned_is_noted_once(ranks: list[OpSequence]) -> None:
    """A failed backward inside of a forward fails that, too: two notes of one rank were taken for those of two."""
    for _ in RANKS:
        ranks[0].publish_abandoned(ZeroDivisionError())
    with pytest.raises(AgreementError, match=r"rank 0 abandoned .*; rank 1 has not come that far"):
        ranks[0].meet_abandoned()
