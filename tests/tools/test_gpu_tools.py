"""The programs for a GPU, from end to end with a CPU in its place: the names used exist, and files are parsed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.harness.fake import fake_world
from tests.harness.fake_device import FakeDevice
from tools.benchmark import gpu, jobs, machine, rounds
from tools.benchmark.jobs import Setting
from tools.benchmark.models import tiny_case
from tools.benchmark.ranks import World
from tools.benchmark.table import render

pytestmark = pytest.mark.single_process

UNITS = 4
TINY = tiny_case(UNITS, 2)


@pytest.fixture
def spun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A CPU that passes for a GPU; the kernels that spin on it, by number of cycles."""
    cycles: list[int] = []
    for name, value in {"max_memory_allocated": 3, "max_memory_reserved": 4, "memory_allocated": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 0})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    monkeypatch.setattr(gpu, "cycles_per_ms", lambda: 1000.0)
    monkeypatch.setattr(gpu, "profile", lambda activities: profile(activities=activities[:1]))
    return cycles


def copies(work: Callable[[], object]) -> int:
    """The number of copies of at least one element in a trace of `work`."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        work()
    return sum(event.name == "aten::copy_" and event.input_shapes[0] != [0] for event in recorded.events())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_stand_in_for_a_collective_moves_nothing(spun: list[int]) -> None:
    whole, shard = torch.zeros(16), torch.ones(2)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, shard, async_op=True).wait()
        dist.all_gather(list(whole.split(2)), shard)

    with fake_world(8):
        assert copies(gather) >= 2 * 8  # by the group itself
        whole.zero_()
        with gpu.StandIns():
            assert copies(gather) == 0
        assert not whole.any() and not spun
        with gpu.StandIns(2.0, of=8):
            gather()
        assert spun == [4000, 4000]  # 16 elements each


def test_stand_ins_are_on_the_streams(spun: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[str] = []
    with fake_world(8), FakeDevice() as device:
        training = jobs.Training(0, Setting(TINY, "flatfsdp"))
        training.warm_up()
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: streams.append(device.current_stream().name))
        with gpu.StandIns(1.0):
            training.step()
    # The last unit of the forward is gathered again: FULL_SHARD. The bitmap is issued by the main stream.
    assert sorted(streams) == ["compute"] + ["reduce"] * UNITS + ["unshard"] * 2 * UNITS


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("engine", ["flatfsdp", "fsdp1", "fsdp2"])
def test_figures_of_a_gpu(engine: str, spun: list[int]) -> None:
    with fake_world(8):
        figures = gpu.inspect(0, Setting(TINY, engine))
    assert (figures["allocated"], figures["reserved"], figures["left"], figures["retries"]) == (3, 4, 1, 0)
    assert (figures["kernels"], figures["overlap"]) == (0, None)  # of a GPU
    assert len(spun) == sum(figures["calls"].values()) > 0
    cell = {"model": TINY.name, "engine": engine, "strategy": "FULL_SHARD", "ranks": [figures]}
    models = [{"name": TINY.name, "unit_bytes": [4]}]
    text = render(
        {"machine": machine.describe("cuda") | {"command": ""}, "models": models, "figures": [cell], "cells": []}
    )
    assert "| FULL_SHARD | 0.0 | 0.0 | 0.0 | 0 | 0 | 0 | - |" in text


def test_worlds_in_which_a_gpu_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds: dict[str, World] = {}

    def note(world: World, job: Callable[..., Any], setting: Setting) -> dict[str, str]:
        assert (job, setting.device) == (gpu.inspect, "cuda")
        worlds[setting.engine] = world
        return {"error": ""}

    monkeypatch.setattr(rounds, "attempt", note)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    rounds.inspect_all([TINY], ["flatfsdp", "fsdp2", "ddp", "floor"], "cuda")
    fake = World(gpu.FAKE_RANKS, "fake")
    assert worlds == {"flatfsdp": fake, "fsdp2": fake, "ddp": World(1, "nccl"), "floor": World(1, "")}
