"""Processes that are started later become ranks of the job, between two steps: the same bits as of an undisturbed
run."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.elastic import start, survive
from flatfsdp.elastic.survive import Survival
from flatfsdp.engine.wrapping.regrouping import Regrouping
from tests.elastic import test_survive
from tests.elastic.test_survive import HYBRIDS, lost_between, lost_in_regroup, never_connected, train
from tests.harness import fresh
from tests.harness.fresh import Outcome

pytestmark = pytest.mark.process

STEPS = 8


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def store() -> dist.TCPStore:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def nothing(rank: int) -> None:
    pass


def begin(
    first: int,
    joins: dict[int, int],
    place: str,
    dies_after: dict[int, float],
    more: Callable[[int], None],
    rank: int,
) -> None:
    """Let processes from number `first` on come later: each when others begin the step that `joins` names. To its
    environment it is rank `place`. `dies_after`: seconds from when it is ready to when it is killed."""
    os.environ["WORLD_SIZE"] = str(first)
    more(rank)
    if rank < first:
        return
    os.environ["RANK"] = place
    notes = store()
    while not notes.check([f"step {joins[rank]}"]):
        time.sleep(0.01)
    reach = Survival.reach

    def reaches(self: Survival) -> bool:
        if rank in dies_after:
            notes.set(f"waits {rank}", "")
            threading.Timer(dies_after.pop(rank), kill).start()
        answer = reach(self)
        notes.set(f"waits {rank}", "")
        return answer

    Survival.reach = reaches  # type: ignore


def hold(joins: dict[int, int], rank: int, number: int) -> None:
    """In a step: note that it has begun, and wait for those that come in it."""
    notes = store()
    notes.set(f"step {number}", "")
    for each in [each for each, step in joins.items() if step == number]:
        deadline = time.monotonic() + 30
        while not notes.check([f"waits {each}"]) and time.monotonic() < deadline:
            time.sleep(0.01)


def play(
    first: int,
    joins: dict[int, int],
    kills: dict[int, tuple[int, str]] | None = None,
    *,
    place: str = "0",
    dies_after: dict[int, float] | None = None,
    more: Callable[[int], None] = nothing,
    **options: Any,
) -> list[Outcome]:
    """A job that begins with `first` ranks; by the number of a process, in which step it comes, and dies."""
    before = functools.partial(begin, first, joins, place, dies_after or {}, more)
    at, world = functools.partial(hold, joins), first + len(joins)
    return fresh.run(world, train, kills or {}, parts=(range(STEPS),), before=before, at=at, timeout=90, **options)


@pytest.fixture(scope="module")
def expected() -> str:
    return undisturbed()


def undisturbed() -> str:
    (outcome,) = fresh.run(1, train, {}, parts=(range(STEPS),))
    assert outcome.error is None, outcome
    return outcome.result[0]


def check(
    outcomes: list[Outcome],
    lost: set[int],
    expected: str,
    *,
    joins: dict[int, int],
    again: int = 0,
    code: int | None = -signal.SIGKILL,
    every: int = 1,
) -> None:
    """All that are not `lost` have taken all steps since they joined, at most so many of them again, and have the
    `expected` model; `lost` processes have ended with the exit `code`; None for any but 0."""
    ends = len(outcomes) - len(lost)
    for number, outcome in enumerate(outcomes):
        if number in lost:
            assert outcome.exit_code == code or (code is None and outcome.exit_code), outcome
            continue
        assert outcome.error is None and outcome.exit_code == 0, outcome
        digest, taken = outcome.result
        steps = sorted(dict(taken))
        assert steps == list(range(steps[0], STEPS)) and len(taken) <= len(steps) + again, taken
        if number in joins:
            assert joins[number] - again <= steps[0] <= joins[number] + 1 + 2 * every + again, taken
        else:
            assert steps[0] == 0, taken
        assert taken[-1] == (STEPS - 1, ends), taken
        assert digest == expected


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_process_joins(first: int, expected: str) -> None:
    joins = {first: 2}
    check(play(first, joins), set(), expected, joins=joins)


@pytest.mark.parametrize(("way", "first"), [("NO_SHARD", 1), (HYBRIDS[0], 2), (HYBRIDS[-1], 3), ("fully_shard", 2)])
def test_a_process_joins_a_model_of_any_strategy(way: str, first: int, expected: str) -> None:
    joins = {first: 2}
    check(play(first, joins, way=way), set(), expected, joins=joins)


def test_two_join_at_once(expected: str) -> None:
    joins = {2: 2, 3: 2}
    check(play(2, joins, group=2), set(), expected, joins=joins)


def test_they_join_at_a_refresh(expected: str) -> None:
    joins = {2: 1}
    check(play(2, joins, every=2), set(), expected, joins=joins, every=2)


def test_the_place_of_a_lost_rank_is_taken_by_another_process(expected: str) -> None:
    joins = {3: 3}
    check(play(3, joins, {1: (1, "backward")}, place="1"), {1}, expected, joins=joins, again=1)


def test_one_that_has_joined_is_lost_like_any(expected: str) -> None:
    joins = {2: 1, 3: 1}
    check(play(2, joins, {0: (5, "forward"), 3: (6, "backward")}), {0, 3}, expected, joins=joins, again=2)


# -- losses while a process joins --------------------------------------------------------------------------------------


def joiner_lost_in_regroup(rank: int) -> None:
    if rank == int(os.environ["WORLD_SIZE"]):
        module = importlib.import_module("flatfsdp.elastic.survive")
        module.regroup = lambda *unused, **named: kill()  # type: ignore


def joiner_lost_between(rank: int) -> None:
    """When the next epoch is agreed on, and before groups are made."""
    if rank == int(os.environ["WORLD_SIZE"]):
        module = importlib.import_module("flatfsdp.elastic.survive")
        module.forget_calls = kill  # type: ignore


@pytest.mark.parametrize("more", [joiner_lost_in_regroup, joiner_lost_between])
def test_one_that_dies_as_it_joins_costs_nothing(more: Callable[[int], None], expected: str) -> None:
    joins = {2: 2}
    outcomes = play(2, joins, more=more)
    check(outcomes, {2}, expected, joins=joins)
    assert all((step, 2) in outcomes[0].result[1] for step in range(STEPS))


@pytest.mark.parametrize("more", [lost_in_regroup, lost_between])
def test_a_rank_that_is_lost_as_another_joins(more: Callable[[int], None], expected: str) -> None:
    joins = {3: 2}
    check(play(3, joins, more=more), {2}, expected, joins=joins)


def fails_in_regroup(rank: int) -> None:
    if rank == int(os.environ["WORLD_SIZE"]):

        def fails(*unused: Any, **named: Any) -> None:
            raise MemoryError("no memory for the shards")

        Regrouping.rebuild = fails  # type: ignore


def test_the_job_goes_on_without_one_that_fails_as_it_joins(expected: str) -> None:
    joins = {2: 2}
    outcomes = play(2, joins, more=fails_in_regroup)
    assert "no memory for the shards" in (outcomes[2].error or ""), outcomes[2]
    check(outcomes, {2}, expected, joins=joins, code=1)


def test_the_job_goes_on_without_one_that_cannot_be_connected(expected: str) -> None:
    joins = {2: 2}
    outcomes = play(2, joins, more=functools.partial(never_connected, 2))
    assert "could not be connected to the others in 2 tries" in (outcomes[2].error or ""), outcomes[2]
    check(outcomes, {2}, expected, joins=joins, code=1)


# -- what is refused, in words -----------------------------------------------------------------------------------------


def wider(rank: int) -> None:
    if rank == int(os.environ["WORLD_SIZE"]):
        layers = [nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4)]
        test_survive.net = lambda: nn.Sequential(*layers)  # type: ignore


def other_steps(rank: int) -> None:
    if rank == int(os.environ["WORLD_SIZE"]):
        survives = test_survive.survive
        test_survive.survive = lambda *args, steps, **named: survives(*args, steps=range(2, 99), **named)  # type: ignore


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (wider, "float32 (4, 40), requires_grad here, and float32 (4, 32), requires_grad in the job. Start the same"),
        (other_steps, "cannot join: steps: range(2, 99) here, and range(0, 8) in the job. Start the same program"),
    ],
)
def test_another_program_is_refused_and_the_job_goes_on(more: Callable[[int], None], words: str, expected: str) -> None:
    joins = {2: 2}
    outcomes = play(2, {**joins}, more=functools.partial(refused, more))
    assert words in (outcomes[2].error or ""), outcomes[2]
    check(outcomes, {2}, expected, joins=joins, code=1)
    assert outcomes[0].result[1] == [(step, 2) for step in range(STEPS)]


def refused(more: Callable[[int], None], rank: int) -> None:
    """Let those that wait for the joiner go on."""
    more(rank)
    if rank == int(os.environ["WORLD_SIZE"]):
        store().set(f"waits {rank}", "")


def late(rank: int, world: int, how: str) -> None:
    """Rank 1 comes when rank 0 has ended."""
    os.environ["WORLD_SIZE"] = "1"
    if rank == 1:
        os.environ["RANK"] = "0"
        outside = store()
        while not outside.check(["ends"]):
            time.sleep(0.01)
        time.sleep(1.0)
    start(wait=3.0)
    if how == "before its steps":
        store().set("ends", "")
        return
    model = FullyShardedDataParallel(nn.Linear(4, 4))
    for step in survive(model, steps=2):
        with step:
            if how == "killed":
                store().set("ends", "")
                kill()
    store().set("ends", "")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("after its steps", "cannot join: the job has ended (after step 1). A new job needs a new store"),
        ("killed", "cannot join: the job has ended (none of its ranks can be reached)"),
        ("before its steps", "start(): cannot start with others, since another process has started as rank 0, nor"),
    ],
)
def test_one_that_comes_too_late_is_refused(how: str, words: str) -> None:
    outcomes = fresh.run(2, late, how, timeout=60)
    assert words in (outcomes[1].error or ""), outcomes[1]


def without_a_store(rank: int, world: int) -> None:
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    with pytest.raises(RuntimeError, match=r"start\(\): expected a store that no rank serves"):
        start()


def test_a_store_that_rank_0_would_serve_is_refused() -> None:
    (outcome,) = fresh.run(1, without_a_store)
    assert outcome.error is None, outcome
