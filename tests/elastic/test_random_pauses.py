"""Ranks that pause for 20 s at a random time, or whose save takes so long, end nobody; those that pause for too long
are fenced when they wake, and the others go on: the same bits."""

from __future__ import annotations

import random
import tempfile
from typing import Any

import pytest

from tests.elastic.test_random_kills import NAMES, expected, note_recoveries
from tests.elastic.test_survive import STEPS, WAYS, check, machine_each, one_machine, train
from tests.harness import fresh, thorough
from tests.harness.thorough import seeds

pytestmark = pytest.mark.process

PAUSE = 20.0  # seconds
LOST_AFTER = 4.0  # of those that are fenced


def drawn(seed: int, worlds: tuple[int, ...]) -> tuple[random.Random, int, int, dict[str, Any]]:
    """The number of ranks, the one that pauses, and options."""
    rng = random.Random(seed)
    world, way, name = rng.choice(worlds), rng.choice(WAYS), rng.choice(NAMES)
    on = rng.choice((one_machine, machine_each))
    thorough.found.world = world
    return rng, world, rng.randrange(world), {"way": way, "name": name, "before": on, "pause": 0.05, "timeout": 120}


def at_any_time(rng: random.Random, seconds: float) -> tuple[int, str]:
    return rng.randrange(STEPS - 1), f"pause of {seconds} after {rng.uniform(0.001, 0.1):.4f}"


@pytest.mark.parametrize("seed", seeds(0, 20))
def test_random_pauses(run: Any, seed: int) -> None:
    rng, world, rank, options = drawn(seed, (2, 3, 4))
    outcomes = fresh.run(world, train, {rank: at_any_time(rng, PAUSE)}, **options)
    check(outcomes, set(), expected(options["name"]), again=0)


@pytest.mark.parametrize("seed", seeds(0, 20))
def test_random_slow_saves(run: Any, seed: int) -> None:
    rng, world, rank, options = drawn(seed, (2, 3, 4))
    slow = rng.randrange(STEPS), f"slow save of {PAUSE}"
    with tempfile.TemporaryDirectory() as folder:
        outcomes = fresh.run(world, train, {rank: slow}, saves=folder, **options)
    check(outcomes, set(), expected(options["name"]), again=0)


@pytest.mark.parametrize("seed", seeds(0, 20))
def test_random_fences(run: Any, seed: int) -> None:
    rng, world, rank, options = drawn(seed, (2, 3, 4))
    too_long = at_any_time(rng, 3 * LOST_AFTER)
    outcomes = fresh.run(world, train, {rank: too_long}, lost_after=LOST_AFTER, **options)
    assert "FencedError: the others go on without this process" in (outcomes[rank].error or ""), outcomes[rank]
    check(outcomes, {rank}, expected(options["name"]), again=2)
    note_recoveries([outcome for number, outcome in enumerate(outcomes) if number != rank])
