"""What it costs to outlive the loss of a rank: steps without `survive`, and in its loops, with many refreshes and few.

One model takes turns of a few steps each way in the same processes, so that a slow minute affects all ways. A turn is
timed from the beginning of one step to that of a later one, with as many refreshes as a longer run has in as many
steps. What a loop makes before its first steps, and waits for after its last, is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from flatfsdp import FullyShardedDataParallel
from flatfsdp.elastic import survive

from .machine import Watch
from .models import MODELS
from .ranks import World
from .rounds import RANKS, Cell, attempt, note, round_numbers
from .statistics import Spread, paired_ratio
from .table import load_lines, machine_line, markdown

CHOSEN = ("gpt", "small")
WARMUP, STEPS, TURNS = 4, 8, 3
WAYS = {"off": None, "each step": 1, "each fourth step": 4}


def survive_rounds(rounds: int, seconds: float | None) -> Cell:
    """Every model, ``rounds`` times or until `seconds` are over."""
    cells, loads = [], []
    for number in round_numbers(rounds, seconds):
        watch = Watch()
        for model in CHOSEN:
            cell = attempt(World(RANKS, "gloo"), time_ways, model)
            for rank in cell.get("ranks", []):
                watch.used(rank["process_cpu"])
            cells.append({"round": number, "model": model, "engine": "flatfsdp", **cell})
            note(cells[-1])
        loads.append(watch.end())
    return {"survive": cells, "load": loads}


def time_ways(rank: int, name: str) -> dict[str, Any]:
    """By way, wall and CPU seconds of a step in each turn. Collective over a gloo world."""
    case = MODELS[name]
    model = FullyShardedDataParallel(case.build(), auto_wrap_policy={case.unit}, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = case.batch(rank, 0)

    def step() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    found: dict[str, Any] = {way: {"wall": [], "cpu": []} for way in WAYS}
    for way in [*WAYS] * TURNS:
        wall = cpu = 0.0
        for number in steps_of(model, optimizer, WAYS[way]):
            if number in (WARMUP, WARMUP + STEPS):
                dist.barrier()
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            step()
        found[way]["wall"].append(wall / STEPS)
        found[way]["cpu"].append(cpu / STEPS)
    return {**found, "process_cpu": time.process_time()}


def steps_of(model: Any, optimizer: torch.optim.Optimizer, every: int | None) -> Iterable[int]:
    """The numbers of steps, to be taken one by one."""
    if every is None:
        yield from range(WARMUP + STEPS + 1)
        return
    for step in survive(model, optimizer, steps=WARMUP + STEPS + 1, every=every):
        with step:
            yield step.number


def render(results: dict[str, Any]) -> str:
    """The table, with a description of the measurement."""
    machine = results["machine"]
    how = (
        f"{RANKS} ranks on gloo, one thread each, AdamW, one microbatch a step. Turns of {STEPS} steps, {TURNS} each "
        "way in a round, in the same processes. Ratios are of a turn to the one without before it, lowest and highest "
        "in brackets."
    )
    lines = ["# Outliving the loss of a rank", "", machine_line(machine), ""]
    lines += [f"Made by `{machine['command']}`: {how}", "", *load_lines(results["load"])]
    return "\n".join([*lines, *table_of(results["survive"])]).rstrip() + "\n"


def table_of(cells: list[Cell]) -> list[str]:
    """A row for each model and way, and a line for each that failed."""
    rows = []
    done = [cell for cell in cells if "ranks" in cell]
    for model in dict.fromkeys(cell["model"] for cell in done):
        for way in WAYS:
            row = [model, way]
            for kind in ("wall", "cpu"):
                times, base = (
                    [value for cell in done if cell["model"] == model for value in cell["ranks"][0][name][kind]]
                    for name in (way, "off")
                )
                row.append(f"{1e3 * Spread.of(times).median:.1f}")
                ratio = paired_ratio(times, base)
                row.append(f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" if way != "off" else "")
            rows.append(row)
    header = ["model", "refresh", "step, ms", "wall : without", "CPU, ms", "CPU : without"]
    failed = [f"{cell['model']}: {cell['error']}" for cell in cells if "error" in cell]
    return [*markdown(header, rows), *failed]
