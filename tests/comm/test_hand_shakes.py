"""A rank that is killed or stopped at a hand-shake of a training step through shared memory, at each of them."""

from __future__ import annotations

import itertools
import os
import re
import signal
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest

from flatfsdp.engine.cpu.chunks import ChunkStream
from tests.comm.test_shared_memory_faults import begun, step
from tests.harness import fresh
from tests.harness.thorough import some
from tests.watchdog.test_faults import LIMIT, frozen_until_gone

pytestmark = pytest.mark.process

# It checks whether it may write a chunk, or read one, and notifies its peers after that: the copy lies between.
HAND_SHAKES = ["to_post", "was_posted", "to_take", "was_taken"]
POINTS = [*product(["killed", "stopped"], HAND_SHAKES, ["before", "behind"])]


def ends(rank: int, world: int, how: str, hand_shake: str, when: str) -> None:
    """Rank 1 is killed, or stopped until the other one is gone, in its second step or third."""
    model, pids = begun(world)
    plain, number = getattr(ChunkStream, hand_shake), itertools.count()
    last = 1 + POINTS.index((how, hand_shake, when)) % 5  # another one in each case

    def end() -> None:
        if next(number) == last:
            os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else frozen_until_gone([pids[0]])

    def watched(self: Any, *args: Any) -> Any:
        if when == "before":
            end()
        found = plain(self, *args)
        if when == "behind" and (found is not None or hand_shake.startswith("was")):
            end()
        return found

    if rank == 1:
        patch.object(ChunkStream, hand_shake, watched).start()
    for seed in range(2):
        step(model, seed)


@pytest.mark.parametrize(
    ("how", "hand_shake", "when"),
    [
        pytest.param(*point, marks=pytest.mark.ranks(2, ends, of=["how", "hand_shake", "when"], timeout=LIMIT))
        for point in some(POINTS, 6)
    ],
)
def test_a_rank_ends_at_a_hand_shake(how: str, hand_shake: str, when: str, outcomes: list[fresh.Outcome]) -> None:
    """The other one ends with a message: the lost rank, or the operations of both when the limit was over."""
    survivor, ended = outcomes
    assert ended.exit_code == -signal.SIGKILL, ended
    assert survivor.exit_code == 1, survivor
    if how == "killed":
        assert re.search(r"LostRankError: .*rank 1 was killed, or crashed", survivor.output), survivor
    else:
        assert re.search(r"WaitError: .* 3 s", survivor.output), survivor
        assert re.search(r"^\[flatfsdp, rank 0\] .* for \d+ s\. ", survivor.output, re.MULTILINE), survivor
