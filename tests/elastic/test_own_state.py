"""Random states and objects of a process that joins: what all members have alike, and generators of its own."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from flatfsdp.elastic import own_state
from flatfsdp.elastic.exchange import EpochRanks
from flatfsdp.elastic.joining import shared_state
from flatfsdp.engine.base.plain_data import encode
from tests.harness import pool

pytestmark = pytest.mark.distributed


class Counted:
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def numbers() -> dict[str, Any]:
    return {"python": random.random(), "torch": torch.rand(3).tolist(), "numpy": numpy.random.rand()}


def joined(rank: int, world: int, alike: list[str]) -> tuple[int, dict[str, Any]]:
    """Ranks 1 and 2 have states, and 0 and 3 join; generators not in `alike` are seeded by the rank."""
    seed = {each: 5 if each in alike else rank for each in ("python", "torch", "numpy")}
    random.seed(seed["python"])
    torch.manual_seed(seed["torch"])
    numpy.random.seed(seed["numpy"])
    things = {"thing": Counted(40 + rank)}
    ranks = EpochRanks()
    is_new = rank in (0, 3)
    own = b"" if is_new else encode(own_state.take(things))
    state = shared_state(own, [1, 2], ranks, 100 + rank)
    own_state.give(things, state)
    return things["thing"].count, numbers()


@pytest.mark.parametrize("alike", [["python", "numpy"], ["torch"]])
def test_generators_that_members_keep_alike_are_alike_on_new_ones_and_others_are_not(alike: list[str]) -> None:
    counts, drawn = zip(*pool.run(4, joined, alike), strict=True)
    assert counts == (41, 41, 42, 41)
    for kind in ("python", "torch", "numpy"):
        assert len({str(each[kind]) for each in drawn}) == (1 if kind in alike else 4)
    again = pool.run(4, joined, alike)
    assert [each for _, each in again] == [*drawn]
