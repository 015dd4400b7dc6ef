"""Ranks that are killed at random, in steps, between them, in refreshes and in recoveries, and others that join: the
same bits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from flatfsdp.elastic.machines import lost_with_machine
from flatfsdp.elastic.parity import parity_groups
from tests.elastic import test_joining
from tests.elastic.test_survive import (
    HYBRIDS,
    MOMENTS,
    STEPS,
    WAYS,
    check,
    machine_each,
    machine_of_two,
    one_machine,
    train,
)
from tests.harness import fresh
from tests.harness.thorough import seeds

pytestmark = pytest.mark.process

MACHINES = [(one_machine, (0, 0, 0, 0)), (machine_each, (0, 1, 2, 3)), (machine_of_two, (0, 0, 1, 1))]
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
    kills, (on, nodes) = drawn(rng, world), rng.choice(MACHINES)
    way = rng.choice((*WAYS, *HYBRIDS) if world == 4 else WAYS)
    outcomes = fresh.run(world, train, kills, group=group, every=every, pause=0.05, way=way, before=on, timeout=90)
    with_machine = lost_with_machine(nodes[:world], kills)
    if way in HYBRIDS:  # of four ranks, two have the same shard of two replicas
        together = any({*members} <= with_machine for members in ((0, 2), (1, 3)))
    else:
        groups = [] if way == "NO_SHARD" else parity_groups(nodes[:world], group)
        lost = [kills.keys() & {*members} for members in groups]
        together = any(len(gone) > 1 and gone & with_machine for gone in lost)
    words = "LostRankError: ranks " + ", ".join(map(str, sorted(kills))) + " are lost at once"
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank not in kills]
    if together and all(words in (outcome.error or "") for outcome in survivors):
        return
    check(outcomes, {*kills}, expected(), again=2 * every)


_expected_of_joins: list[str] = []


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
        moment = rng.choice((*MOMENTS, "after", "after", "after"))
        kills[rng.randrange(first)] = (
            rng.randrange(test_joining.STEPS - 2),
            f"after {rng.uniform(0, 0.1):.4f}" if moment == "after" else moment,
        )
    if rng.random() < 1 / 3:
        dies_after[rng.choice([*joins])] = rng.uniform(0, 0.15)
    outcomes = test_joining.play(first, joins, kills, dies_after=dict(dies_after), group=group, every=every, pause=0.05)
    lost = {*kills, *dies_after}
    survivors = [outcome.error or "" for number, outcome in enumerate(outcomes) if number not in lost]
    ends = (" are lost at once", "cannot join: the job has ended")  # the latter if it was no member yet
    if (
        len(lost) > 1
        and ends[0] in "".join(survivors)
        and all(any(each in error for each in ends) for error in survivors)
    ):
        return
    if not _expected_of_joins:
        _expected_of_joins.append(test_joining.undisturbed())
    test_joining.check(
        outcomes, lost, _expected_of_joins[0], joins=joins, again=2 * every * len(lost), every=every, code=None
    )
