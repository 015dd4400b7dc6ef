"""The protocol of the outboxes, and the bell, in every interleaving of a few ranks whose stores others see late.

Each model is also given faults that it has to find.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from flatfsdp.engine.cpu.chunks import Chunk, ChunkStream
from tests.harness.interleavings import Wrong
from tests.harness.outbox_model import Scope, explore
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.unit

ONE, DEPENDENT = (1, False), (1, True)

FEW = {
    "two chunks in turn": Scope(2, (ONE,) * 4),
    "each load by itself": Scope(2, (ONE,) * 3, apart=True),
    "chunks of several cells": Scope(2, ((2, False), ONE), cells=2, room=5, apart=True),
    "what the one before brought": Scope(2, ((2, False), DEPENDENT, ONE)),
    "a small window": Scope(2, (ONE,) * 3, room=4, in_flight=1),
    "three ranks, one place": Scope(3, (ONE, DEPENDENT), room=1),
    "outboxes at rest": Scope(2, (ONE,) * 2, rests=True),
    "ranks that sleep": Scope(2, (ONE,), with_bells=True),
}
MANY = {
    "five in turn": Scope(2, (ONE,) * 5, apart=True),
    "a window of two": Scope(2, (ONE,) * 5, room=8),
    "three ranks, two places": Scope(3, (ONE,) * 3),
    "three ranks, each load by itself": Scope(3, (ONE,) * 2, room=1, apart=True),
    "three ranks, what the one before brought": Scope(3, (ONE, DEPENDENT, ONE)),
    "three ranks' outboxes at rest": Scope(3, (ONE,), rests=True),
    "ranks that sleep for two": Scope(2, (ONE,) * 2, with_bells=True),
    "two wake a third": Scope(3, (ONE,), with_bells=True, others_go_on=True),
}


@pytest.mark.parametrize("name", [*FEW, *(MANY if is_thorough() else ())])
def test_every_interleaving_brings_each_chunk_to_all_and_ends(name: str) -> None:
    assert explore((FEW | MANY)[name]) > 100


class PostsWithoutAsking(ChunkStream[Any]):
    def to_post(self, taken_by_peers: Sequence[int]) -> Chunk[Any] | None:
        return super().to_post([1000] * len(taken_by_peers))


class AsksOnePeer(ChunkStream[Any]):
    def to_take(self, posted_by_peers: Sequence[int]) -> Chunk[Any] | None:
        return super().to_take(posted_by_peers[:1])


class HearsOnePeer(ChunkStream[Any]):
    def to_post(self, taken_by_peers: Sequence[int]) -> Chunk[Any] | None:
        return super().to_post([max(taken_by_peers)])


class WaitsForWhatItHasPosted(ChunkStream[Any]):
    """It posts the second once all have taken the first, and takes once it has posted both."""

    def to_take(self, posted_by_peers: Sequence[int]) -> Chunk[Any] | None:
        return super().to_take(posted_by_peers) if self.posted > self.taken + 1 else None


class RestsWithoutAsking(ChunkStream[Any]):
    def is_drained(self, taken_by_peers: Sequence[int]) -> bool:
        return super().is_drained([1000] * len(taken_by_peers))


@pytest.mark.parametrize(
    ("scope", "kind", "found"),
    [
        (Scope(2, (ONE,) * 2, room=1), PostsWithoutAsking, "has what is of chunk 1"),
        (Scope(3, (ONE,)), AsksOnePeer, "has what is of chunk -1"),
        (Scope(3, (ONE,) * 2, room=1), HearsOnePeer, "has what is of chunk 1"),
        (Scope(2, (ONE,) * 2, room=1), WaitsForWhatItHasPosted, "never come to an end"),
        (Scope(2, (ONE,) * 2, rests=True), RestsWithoutAsking, "has what is of chunk -1"),
        (Scope(2, (ONE,), in_order=False), ChunkStream, "has what is of chunk -1"),
        (Scope(2, (ONE,), with_bells=True, barriers=False), ChunkStream, "never come to an end"),
    ],
    ids=[
        "posts without asking",
        "asks one",
        "hears one",
        "waits",
        "rests",
        "stores in any order",
        "no barriers",
    ],
)
def test_the_model_finds_faults(scope: Scope, kind: type[ChunkStream[Any]], found: str) -> None:
    """Of the protocol; of a processor that does not make stores visible in order; of a bell without its barriers, by
    which a rank is not woken."""
    with pytest.raises(Wrong, match=found):
        explore(scope, kind)
