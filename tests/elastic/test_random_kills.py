"""Ranks that are killed at random, in steps, between them, in refreshes and in recoveries: the same bits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from flatfsdp.elastic.parity import parity_groups
from tests.elastic.test_survive import HYBRIDS, MOMENTS, STEPS, WAYS, check, train
from tests.harness import fresh
from tests.harness.thorough import seeds

pytestmark = pytest.mark.process

_expected: list[str] = []


def expected() -> str:
    """The hash of an undisturbed run, of which each process needs one."""
    if not _expected:
        (alone,) = fresh.run(1, train, {})
        assert alone.error is None, alone
        _expected.append(alone.result[0])
    return _expected[0]


def drawn(rng: random.Random, world: int) -> dict[int, tuple[int, str]]:
    """By rank, the step and the moment in which it dies: one rank, or of four ranks two."""
    lost = rng.sample(range(world), rng.choice((1, 2)) if world == 4 else 1)
    kills = {}
    for rank in lost:
        moment = rng.choice((*MOMENTS, "after", "after"))
        kills[rank] = rng.randrange(STEPS - 2), f"after {rng.uniform(0, 0.1):.4f}" if moment == "after" else moment
    return kills


@pytest.mark.parametrize("seed", seeds(2, 300))
def test_random_kills(run: Any, seed: int) -> None:
    rng = random.Random(seed)
    world, group, every = rng.choice((2, 3, 4)), rng.choice((2, 4)), rng.choice((1, 1, 2))
    kills = drawn(rng, world)
    way = rng.choice((*WAYS, *HYBRIDS) if world == 4 else WAYS)
    outcomes = fresh.run(world, train, kills, group=group, every=every, pause=0.05, way=way, timeout=90)
    # Of four ranks, two have the same shard of two replicas.
    groups = [(0, 2), (1, 3)] if way in HYBRIDS else [] if way == "NO_SHARD" else parity_groups(world, group)
    together = any(len(kills.keys() & set(members)) > 1 for members in groups)
    words = "LostRankError: ranks " + ", ".join(map(str, sorted(kills))) + " are lost at once"
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank not in kills]
    if together and all(words in (outcome.error or "") for outcome in survivors):
        return
    check(outcomes, {*kills}, expected(), again=2 * every)
