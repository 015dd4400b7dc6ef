"""Parity with one process: every scenario is trained under the engine, and compared with one process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tools.benchmark import ranks
from tools.benchmark.ranks import World

from . import alone
from .card import Card, card_of
from .plays import Stage
from .report import Report
from .scenarios import Scenario, all_scenarios

BRIEF = ("FULL_SHARD, flat parameters", "fully_shard, bf16")


def run(report: Report, card: Card, where: str, *, brief: bool) -> None:
    """Run in a world of "one rank", with the backend of the card, or of "two ranks" on one card, with gloo."""
    world = World(1, card.backend) if where == "one rank" else World(2, "gloo")
    names = [scenario.name for scenario in all_scenarios() if not brief or scenario.name in BRIEF]
    while names:
        try:
            ranks.run(world, play_all, report.path, card.kind, names, timeout=600.0)  # the runner ends it earlier
            names = []
        except ranks.RankFailed as error:
            names = _after_the_one_that_failed(report, names, error)
    report.reload()


def _after_the_one_that_failed(report: Report, names: list[str], error: Exception) -> list[str]:
    """Report the one of the scenarios `names` in which ranks died. Returned: the remaining names."""
    report.reload()
    through = {row.what for row in report.found.rows}
    at = next((number for number, name in enumerate(names) if name not in through), None)
    if at is None:
        raise error
    report.failed(names[at], "ranks live through it", error)
    return names[at + 1 :]


def play_all(rank: int, path: Path, kind: str, names: Sequence[str], how: str = "") -> None:
    """A job: the scenarios of these `names`, one after the other; rank 0 reports, with ``how`` in the names of rows.
    Collective."""
    warnings.simplefilter("ignore")  # a hybrid of one rank shards nothing
    card, report, world = card_of(kind), Report(path) if rank == 0 else None, dist.get_world_size()
    card.begin()
    for scenario in all_scenarios():
        if scenario.name in names:
            play(rank, world, card, report, replace(scenario, name=how + scenario.name))


def play(rank: int, world: int, card: Card, report: Report | None, scenario: Scenario) -> None:
    """Run one scenario on this rank. Collective."""
    goal = f"at most {scenario.within:g} apart"
    stage = Stage(rank, world, card.device, scenario.wrap, scenario.course)
    far, problem = 0.0, None
    try:
        story = scenario.play(stage)
        card.synchronize()
        far = alone.apart(story, alone.train(scenario.course, world, card.device), rank, world)
    except Exception as error:
        problem = error
    found = _of_all((far, None if problem is None else f"{type(problem).__name__}: {problem}"), world)
    if report is None:
        return
    if problem is not None:
        report.failed(scenario.name, goal, problem)
    elif words := next((words for _, words in found if words), None):
        report.goal(scenario.name, goal, f"another rank: {words}"[:400], False)
    else:
        worst = max(far for far, _ in found)
        report.goal(scenario.name, goal, f"{worst:.1e}", worst <= scenario.within)


def _of_all(mine: Any, world: int) -> list[Any]:
    if world == 1:
        return [mine]
    found: list[Any] = [None] * world
    dist.all_gather_object(found, mine)
    return found
