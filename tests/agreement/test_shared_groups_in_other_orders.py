"""Models that share some of their process groups, of which two ranks of one group run them in different orders: every
rank ends in words, within seconds."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist

import flatfsdp
from tests.agreement.test_agreement import step
from tests.agreement.test_shared_groups import WORLDS, built
from tests.harness import fresh
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.process

LIMIT = 60.0  # seconds for all ranks to end once they have started; on idle cores it takes 5


def opposite(rank: int, ranks: int, world: str, before: int) -> None:
    """All groups of shards run the models in one order, but not all of them in the same."""
    dist.init_process_group("gloo")
    flatfsdp.set_collective_timeout(report_after=1000)  # no report of a wait is needed
    models = built(world)
    for _ in range(before):
        for model in models:
            step(model)
    for _ in range(2):
        for model in models if rank < ranks // 2 else models[::-1]:
            step(model)


def reported(outcomes: list[fresh.Outcome]) -> list[str]:
    """What each rank ended with."""
    messages = []
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 1, (rank, outcome)
        found = re.search(r"AgreementError: (ranks? .*)", f"{outcome.output}\n{outcome.error or ''}")
        assert found is not None, (rank, outcome)
        messages.append(found[1])
    return messages


# One of each way to share groups; the others' groups are among these.
USUAL = ("replicas", "replicas beside shards over their group", "own groups of units")
OTHERS = sorted(WORLDS.keys() - {"shards beside replicas", *USUAL})


@pytest.mark.ranks(4, opposite, of=["world"], before=2, timeout=LIMIT)
@pytest.mark.parametrize("world", [*USUAL, *(OTHERS if is_thorough() else [])])
def test_every_rank_ends_in_words(outcomes: list[fresh.Outcome], world: str) -> None:
    for rank, message in enumerate(reported(outcomes)):
        one, other = rank % 2, rank % 2 + 2  # those of its group
        what = "began a (forward|backward)"
        words = rf"ranks run their models in different orders: rank {one} {what} of .*; rank {other} {what} of "
        assert re.match(words, message), (rank, message)


@pytest.mark.ranks(4, opposite, of=["world"], before=0, timeout=LIMIT)
@pytest.mark.parametrize("world", ["replicas", "replicas beside shards over their group"])
def test_so_it_does_in_the_first_iteration(outcomes: list[fresh.Outcome], world: str) -> None:
    places = "ranks wait for each other in different places: "
    words = "ranks 0, 1 first runs the model " if world == "replicas" else places
    for message in reported(outcomes):
        assert message.startswith(words), message
