"""Scenarios of `tools/gpu_check.py` on two ranks: torch's calls to gloo there, which must be ones that serve a card.

torch's functional all-gather is not: gloo reads an accelerator's memory as if it were the host's, and the process dies.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

from flatfsdp.engine.base import _dtensor
from tests.conftest import Run
from tests.harness.thorough import is_thorough
from tools.gpu import alone, wraps
from tools.gpu.plays import Stage
from tools.gpu.scenarios import all_scenarios

CPU = torch.device("cpu")
SERVED = {"_allgather_base_", "allreduce_"}  # by gloo, wherever tensors are
TRIED = ("fully_shard, clip by torch", "fully_shard, state dicts half-way")  # without --thorough

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


def issued(rank: int, world: int, names: list[str]) -> dict[str, tuple[float, Counter[str]]]:
    """For each scenario its distance from one process, and the collectives before its parameters were gathered."""
    found = {}
    for scenario in all_scenarios():
        if scenario.name in names:
            models: list[Any] = []
            stage = Stage(rank, world, CPU, scenario.wrap, scenario.course)
            with (
                patch.object(wraps, "whole_parameters", lambda model, models=models: models.append(model) or {}),
                profile(activities=[ProfilerActivity.CPU]) as recorded,
            ):
                story = scenario.play(stage)
            story = alone.Story(story.losses, wraps.whole_parameters(models[0]))
            far = alone.apart(story, alone.train(scenario.course, world, CPU), rank, world)
            names_of = (event.name.partition("::") for event in recorded.events())
            found[scenario.name] = far, Counter(name for space, _, name in names_of if space == "c10d")
    return found


def test_scenarios_ask_gloo_only_for_what_it_does_on_a_card(pool2: Run) -> None:
    scenarios = {each.name: each for each in all_scenarios() if each.name.startswith("fully_shard")}
    names = [name for name in scenarios if is_thorough() or name in TRIED]
    for found in pool2(issued, names):
        assert list(found) == names
        for name, (far, calls) in found.items():
            assert far <= scenarios[name].within, name
            assert calls.keys() <= SERVED, name


def wholes_by_host(rank: int, world: int) -> list[str]:
    """DTensors that differ from the distributed values when they are gathered from the host."""
    mesh, wrong = init_device_mesh("cpu", (world,)), []
    whole = torch.arange(15.0).view(5, 3)
    for placement in (Shard(0), Shard(1), Replicate()):
        made = distribute_tensor(whole, mesh, [placement])
        with patch.object(_dtensor, "_is_gathered_by_host", lambda value, device: True):
            if not torch.equal(_dtensor.whole_of(made), whole):
                wrong.append(str(placement))
    return wrong


def test_wholes_that_are_gathered_from_the_host(pool2: Run) -> None:
    assert pool2(wholes_by_host) == [[], []]
