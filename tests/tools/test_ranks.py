"""Ranks that `tools/benchmark` starts: the first that fails ends all, and the message has its cause."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tools.benchmark import ranks
from tools.benchmark.ranks import RankFailed, World

pytestmark = pytest.mark.process


def end(rank: int, how: str) -> int:
    """Rank 1 dies, and rank 0 waits for it."""
    if how != "returns":
        if rank == 0:
            time.sleep(100)
        if how == "exits":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSEGV)
    return rank


def test_how_ranks_end() -> None:
    world = World(2, "none")
    assert ranks.run(world, end, "returns") == [0, 1]
    begun = time.monotonic()
    with pytest.raises(RankFailed, match=r"^rank 1 died with status 3$"):
        ranks.run(world, end, "exits", timeout=100.0)
    with pytest.raises(RankFailed, match=r"^rank 1 died by SIGSEGV$"):
        ranks.run(world, end, "dies", timeout=100.0)
    assert time.monotonic() - begun < 60
    with pytest.raises(RankFailed, match=r"^rank 0 did not answer in time$"):
        ranks.run(World(1, "none"), end, "exits", timeout=0.1)
