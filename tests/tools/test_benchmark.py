"""The benchmark's arithmetic: models of the stated size, paired ratios, rows that must not be believed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tools.benchmark import machine, memory, profile, rounds
from tools.benchmark.engines import FLOOR
from tools.benchmark.gpu import kernels_of, overlap
from tools.benchmark.models import MODELS
from tools.benchmark.rows import Timings, figures_row
from tools.benchmark.statistics import distance, joined, paired_ratio
from tools.benchmark.table import render

pytestmark = pytest.mark.unit

MIB = 2**20


@pytest.mark.parametrize(
    ("model", "units", "mib"),
    [("gpt", 11, 91.787), ("small", 64, 1.281), ("mlp", 8, 32.047), ("mlp8x", 8, 256.266), ("experts", 4, 32.133)],
)
def test_models_have_the_stated_bytes(model: str, units: int, mib: float) -> None:
    sizes = MODELS[model].unit_bytes()
    assert (len(sizes), round(sum(sizes) / MIB, 3)) == (units, mib)


@pytest.mark.parametrize("model", ["gpt", "small", "experts"])
def test_models_and_batches_are_the_same_at_every_call(model: str) -> None:
    case = MODELS[model]
    first, second = ([*case.build().parameters(), *case.batch(1, 2)] for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert not torch.equal(case.batch(0, 2)[0], case.batch(1, 2)[0])


def test_a_slow_round_does_not_change_a_ratio() -> None:
    assert paired_ratio([2.0, 20.0, 2.2], [4.0, 40.0, 4.0]) == (0.5, 0.5, 0.55)


def test_distances_of_trajectories() -> None:
    assert distance([1.0, 2.02], [1.0, 2.0]) == pytest.approx(0.01)
    assert distance([1.0, float("nan")], [1.0, float("nan")]) == float("inf")
    assert distance([1.0], [1.0, 2.0]) == float("inf")


def test_small_neighbors_are_sent_together() -> None:
    assert joined([3, 3, 9, 1, 4, 2], 5) == [6, 9, 5, 2]


def test_bytes_copied_are_shown_of_any_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """They exclude the model's own copies, which are checked, too."""

    def attempt(world: Any, job: Any, setting: Any) -> dict[str, Any]:
        copied = {"forward": 2 if setting.engine == FLOOR else 5}
        return {"ranks": [{"calls": {}, "bytes": {}, "copied": copied, "scaled": 0}]}

    monkeypatch.setattr(rounds, "attempt", attempt)
    monkeypatch.setattr(rounds, "note", lambda cell: None)
    cells = rounds.inspect_all([MODELS["mlp"]], ["flatfsdp-front"])
    row = figures_row(cells, "mlp", "flatfsdp-front")
    assert (row["copied forward"], row["copied backward"], row["scaled"]) == (3, 0, 0)
    assert [each["engine"] for each in cells].count(FLOOR) == 1


def cell(engine: str, number: int, seconds: float, losses: list[float]) -> dict[str, Any]:
    phases = dict.fromkeys(("forward", "backward", "optimizer", "forward cpu", "backward cpu", "optimizer cpu"), 1.0)
    steps = [{**phases, "step": seconds, "cpu": seconds, "faults": 0, "loss": loss} for loss in losses]
    return {"round": number, "model": "m", "engine": engine, "ranks": [{"steps": steps, "resident_peak": 0}] * 2}


def timings(*cells: dict[str, Any]) -> Timings:
    truth = [cell(engine, number, 4.0 * (1 + number), [3, 2, 1]) for engine in ("ddp", "fsdp1") for number in range(2)]
    return Timings([*truth, *cells], "m")


def test_rows_pair_rounds() -> None:
    row = timings(*(cell("flatfsdp", number, 2.0 * (1 + number), [3, 2, 1]) for number in range(2))).row("flatfsdp")
    assert row["step"] == (3.0, 2.0, 4.0)
    assert row["step ratio"] == (0.5, 0.5, 0.5)


def test_a_row_that_trains_something_else_is_invalid() -> None:
    wrong = timings(*(cell("flatfsdp", number, 2.0, [3, 2, 1 - 0.1 * number]) for number in range(2)))
    assert wrong.row("flatfsdp") == {"failure": "INVALID: losses of rank 0 differ from ddp's by 1.0e-01 (round 1)"}


def test_one_process_is_compared_while_its_data_are_the_same() -> None:
    alone = timings(*(cell("floor", number, 1.0, [3, 9, 9]) for number in range(2)))
    assert alone.failure("floor") is None


def test_a_row_that_failed_reports_why() -> None:
    failed = {"round": 0, "model": "m", "engine": "fsdp2", "error": "rank 1: Traceback\n  ...\nValueError: no\n"}
    assert timings(failed).row("fsdp2") == {"failure": "ValueError: no"}


@pytest.mark.parametrize(("exchange", "wall", "cpu"), [(6.0, 6.0, 9.0), (2.0, 3.0, 5.0)])
def test_the_limit_is_the_longer_of_arithmetic_and_exchange(exchange: float, wall: float, cpu: float) -> None:
    """Arithmetic takes three seconds: forward, backward and an update of one each."""
    engines = {"flatfsdp": 12.0, "floor": 3.0, "exchange": exchange}
    measured = timings(*(cell(name, number, took, [3, 2, 1]) for name, took in engines.items() for number in range(2)))
    row = measured.row("flatfsdp")
    assert (row["step limit"].median, row["cpu limit"].median) == (12.0 / wall, 12.0 / cpu)
    assert "step limit" not in timings(*(cell("flatfsdp", number, 2.0, [3, 2, 1]) for number in range(2))).row(
        "flatfsdp"
    )


def test_a_round_beside_another_program_is_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds on two cores, of which this benchmark used twelve: the rest is another's."""
    times, averages = iter([(100.0, 400.0), (116.0, 420.0)]), iter([(0.5, 0.0, 0.0), (1.5, 0.0, 0.0)])
    monkeypatch.setattr(machine, "_busy_and_all", lambda: next(times))
    monkeypatch.setattr(machine.os, "getloadavg", lambda: next(averages))
    watch = machine.Watch()
    for seconds in (5.0, 7.0):
        watch.used(seconds)
    assert watch.end() == {"before": 0.5, "after": 1.5, "others": 0.2, "quiet": False}


COUNTED = """
import torch
from tools.benchmark.memory import Counter
older, counter = torch.empty(3_000_000), Counter()
kept = torch.empty(1_000_000)
torch.empty(500_000)
del older
print(counter.live(), counter.peak(), counter.peak())
kept.untyped_storage().resize_(0)
print(counter.live())
"""


@pytest.mark.skipif(memory.build() is None, reason="no C compiler")
def test_bytes_of_live_tensors_are_exact() -> None:
    environment = {**os.environ, "LD_PRELOAD": str(memory.build())}
    command = [sys.executable, "-c", COUNTED]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=120)
    assert ended.stdout == "4000000 6000000 4000000\n0\n"


def test_overlap_is_read_from_the_ranges_of_kernels() -> None:
    def event(name: str, start: float, end: float, category: str = "kernel") -> dict[str, Any]:
        return {"name": name, "cat": category, "ts": start, "dur": end - start, "args": {"stream": 7}}

    events = [
        event("void spin_kernel(long)", 0, 10),
        event("ncclDevKernel_AllGather", 8, 20),
        event("gemm", 5, 9),
        event("Memcpy DtoD", 8, 12, "gpu_memcpy"),
        event("forward", 0, 100, "gpu_user_annotation"),
        {"name": "process_name", "ph": "M"},
    ]
    kernels = kernels_of({"traceEvents": events})
    assert [kernel.copies for kernel in kernels] == [False, False, False, True]
    assert overlap(kernels) == pytest.approx(7 / 20)
    assert overlap(kernels[2:]) is None


MACHINE = dict.fromkeys("date commit torch python cores cpu memory_gib device command".split(), "?")


def test_host_times_stand_in_the_table_by_world() -> None:
    cells = [
        {"round": number, "engine": engine, "ranks": [{"2": {"1": 200.0 + number, "512": 1300.0}}]}
        for engine in ("flatfsdp", "bare")
        for number in range(3)
    ]
    text = render({"machine": MACHINE, "host": cells})
    assert "| engine | 2 tensors, 1 ranks | 2 tensors, 512 ranks |" in text
    assert "| flatfsdp | 201 [200 to 202] | 1300 |" in text
    assert "| bare collectives | 201 [200 to 202] | 1300 |" in text


def test_sweeps_stand_in_the_table_by_size() -> None:
    seconds = {"fsdp1": 4.0, "ddp": 1.0, "flatfsdp": 3.0}
    cells = [{**cell(name, 0, took, [3, 2, 1]), "model": "m"} for name, took in seconds.items()]
    wrong = [{**cell(name, 0, took, [3, 2, took]), "model": "n"} for name, took in seconds.items()]
    text = render({"machine": MACHINE, "cells": cells + wrong, "sweeps": {"Units": {"1": "m", "64": "n"}}})
    assert "| engine | 1 | 64 |" in text
    assert "| flatfsdp | 3000, 3000 (0.75) | invalid |" in text


def test_what_failed_stands_in_the_table() -> None:
    failed = {"model": "m", "engine": "fsdp2", "strategy": "FULL_SHARD", "error": "rank 1: Traceback\nValueError: no\n"}
    cells = [{**failed, "round": 0}]
    text = render(
        {"machine": MACHINE, "models": [{"name": "m", "unit_bytes": [4]}], "cells": cells, "figures": [failed]}
    )
    assert "- FSDP2: ValueError: no\n" in text
    assert "- FSDP2, FULL_SHARD: failed, ValueError: no\n" in text


STEP = "main (run.py:1);train_step (tools/benchmark/clock.py:54)"
CALL = "_call_impl (torch/nn/modules/module.py:9)"
ENGINE = "run (/here/flatfsdp/unit.py:3)"
AUTOGRAD = "backward (torch/_tensor.py:5);_engine_run_backward (torch/autograd/graph.py:7)"


@pytest.mark.parametrize(
    ("stack", "owner"),
    [
        (f"{STEP};{CALL};{ENGINE};{CALL};forward (tools/benchmark/models.py:71)", profile.FORWARD),
        (f"{STEP};{CALL};{ENGINE};{CALL};layer_norm (torch/nn/functional.py:1)", profile.FORWARD),
        (f"{STEP};{CALL};{ENGINE};split (torch/_tensor.py:2)", "flatfsdp/unit.py"),  # of no package, so its caller's
        (f"{STEP};{CALL};forward (/x/torch/distributed/fsdp/api.py:1)", "torch/distributed/fsdp/api.py"),
        (f"{STEP};{AUTOGRAD}", profile.BACKWARD),
        (f"{STEP};{AUTOGRAD};__call__ (/here/flatfsdp/hooks.py:1)", "flatfsdp/hooks.py"),
        (f"{STEP};step (/x/torch/optim/adam.py:1)", profile.OPTIMIZER),
        (STEP, profile.REST),
    ],
)
def test_a_sample_is_the_innermost_owners(stack: str, owner: str) -> None:
    beside = "main (run.py:1);_run (/here/flatfsdp/watch.py:1) 50"  # another thread
    assert profile.owners(f"{stack} 3\n{beside}\n{stack} 4\n") == {owner: 7}
