"""Ranks that are killed at random, in steps, between them, in saves, in refreshes and in recoveries: the same bits."""

from __future__ import annotations

import functools
import importlib.util
import random
import re
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest

from flatfsdp.elastic.machines import lost_with_machine
from flatfsdp.elastic.parity import parity_groups
from tests.elastic.test_survive import (
    HYBRIDS,
    MODELS,
    MOMENTS,
    RECOVERY,
    STEPS,
    WAYS,
    check,
    machine_each,
    machine_of_two,
    one_machine,
    train,
    undisturbed,
)
from tests.harness import fresh, thorough
from tests.harness.fresh import Outcome
from tests.harness.thorough import seeds

pytestmark = pytest.mark.process

MACHINES = [(one_machine, (0, 0, 0, 0)), (machine_each, (0, 1, 2, 3)), (machine_of_two, (0, 0, 1, 1))]
NAMES = [name for name in MODELS if name != "llama" or importlib.util.find_spec("transformers")]
_RECOVERED = re.compile(r"goes on with \d+ ranks from step \d+, ([\d.]+) s after (?!others came)")

# The hash of an undisturbed run, of which each process needs one for each model.
expected = functools.cache(undisturbed)


def drawn(rng: random.Random, world: int) -> dict[int, tuple[int, str]]:
    """By rank, the step and the moment in which it dies: one rank, or of four ranks two."""
    lost = rng.sample(range(world), rng.choice((1, 2)) if world == 4 else 1)
    kills = {rank: (rng.randrange(STEPS - 2), moment(rng, (*MOMENTS, "save", "refresh"))) for rank in lost}
    if len(lost) == 2 and rng.random() < 1 / 3:
        kills[lost[1]] = -1, rng.choice([*RECOVERY])
    return kills


def moment(rng: random.Random, moments: Sequence[str]) -> str:
    """One of them, or any time."""
    return f"after {rng.uniform(0, 0.1):.4f}" if rng.random() < 1 / 3 else rng.choice(moments)


def note_recoveries(outcomes: Sequence[Outcome]) -> None:
    """For a report, the seconds that the slowest rank took for each."""
    each = [[float(seconds) for seconds in _RECOVERED.findall(outcome.output)] for outcome in outcomes]
    most = max(map(len, each))
    thorough.found.recoveries += [max(times) for times in zip(*(one for one in each if len(one) == most), strict=True)]


@pytest.mark.parametrize("seed", seeds(2, 300))
def test_random_kills(run: Any, seed: int) -> None:
    rng = random.Random(seed)
    world, group, every = rng.choice((2, 3, 4)), rng.choice((2, 4)), rng.choice((1, 1, 2))
    kills, (on, nodes) = drawn(rng, world), rng.choice(MACHINES)
    way, name = rng.choice((*WAYS, *HYBRIDS) if world == 4 else WAYS), rng.choice(NAMES)
    options: dict[str, Any] = {"group": group, "every": every, "way": way, "name": name, "before": on}
    thorough.found.world = world
    with tempfile.TemporaryDirectory() as folder:
        saves = folder if "save" in [moment for _, moment in kills.values()] else ""
        outcomes = fresh.run(world, train, kills, pause=0.05, saves=saves, timeout=90, **options)
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
        thorough.found.refused = True
        return
    check(outcomes, {*kills}, expected(name), again=2 * every)
    note_recoveries(survivors)
