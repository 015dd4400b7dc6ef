"""Processes that join a job at random, in which others are killed at random: the same bits."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from tests.elastic import test_joining
from tests.elastic.test_random_kills import moment, note_recoveries
from tests.elastic.test_survive import MOMENTS
from tests.harness import thorough
from tests.harness.thorough import seeds

pytestmark = pytest.mark.process

expected = functools.cache(test_joining.undisturbed)


@pytest.mark.parametrize("seed", seeds(1, 300))
def test_random_joins(run: Any, seed: int) -> None:
    """One or two processes join a job of 1 to 3 ranks. In two of three jobs one of the first ranks is killed, at any
    time, and in one of three one that joins, as it joins or soon after."""
    rng = random.Random(seed)
    first, group, every = rng.choice((1, 2, 2, 3)), rng.choice((2, 4)), rng.choice((1, 1, 2))
    joins = {number: rng.randrange(3) for number in range(first, first + rng.choice((1, 2)))}
    kills: dict[int, tuple[int, str]] = {}
    dies_after: dict[int, float] = {}
    if first > 1 and rng.random() < 2 / 3:
        kills[rng.randrange(first)] = rng.randrange(test_joining.STEPS - 2), moment(rng, (*MOMENTS, "refresh"))
    if rng.random() < 1 / 3:
        dies_after[rng.choice([*joins])] = rng.uniform(0, 0.15)
    thorough.found.world = first + len(joins)
    outcomes = test_joining.play(first, joins, kills, dies_after=dict(dies_after), group=group, every=every, pause=0.05)
    lost = {*kills, *dies_after}
    survivors = [outcome.error or "" for number, outcome in enumerate(outcomes) if number not in lost]
    ends = (" are lost at once", "cannot join: the job has ended")  # the latter if it was no member yet
    if (
        len(lost) > 1
        and ends[0] in "".join(survivors)
        and all(any(each in error for each in ends) for error in survivors)
    ):
        thorough.found.refused = True
        return
    again = 2 * every * len(lost)
    test_joining.check(outcomes, lost, expected(), joins=joins, again=again, every=every, code=None)
    note_recoveries([outcome for number, outcome in enumerate(outcomes) if number not in lost])
