"""What the same bits on any number of ranks cost: training with and without `deterministic_sums`, side by side.

Three copies of a model take turns step by step in the same processes, so that a slow second affects all of them.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import flatfsdp
from flatfsdp import FullyShardedDataParallel

from .machine import Watch
from .models import MODELS
from .ranks import World
from .rounds import RANKS, Cell, attempt, note, round_numbers
from .statistics import Spread
from .table import load_lines, machine_line, markdown

EACH = 4  # microbatches of a rank
WARMUP, STEPS = 2, 8
CHOSEN = ("gpt", "small")
THROUGH = {"shared memory": True, "messages": False}
REDUCED = ("once a step", "each time")
WAYS = {
    "off": "without",
    "aligned": "a rank's microbatches are consecutive",
    "in turns": "microbatches are dealt out in turns",
}


def same_bits_rounds(rounds: int, seconds: float | None) -> Cell:
    """Every model through every exchange, ``rounds`` times or until `seconds` are over."""
    cells, loads = [], []
    for number in round_numbers(rounds, seconds):
        watch = Watch()
        for model in CHOSEN:
            for through in THROUGH:
                for reduced in REDUCED:
                    cell = attempt(World(RANKS, "gloo"), time_ways, model, through, reduced)
                    for rank in cell.get("ranks", []):
                        watch.used(rank["process_cpu"])
                    cells.append({"round": number, "model": model, "engine": f"{through}, {reduced}", **cell})
                    note(cells[-1])
        loads.append(watch.end())
    return {"same_bits": cells, "load": loads}


def time_ways(rank: int, name: str, through: str, reduced: str) -> dict[str, Any]:
    """By way, wall and CPU seconds of each step, and the engine's memory at its peak. Collective over a gloo world."""
    flatfsdp.share_host_memory(THROUGH[through])
    flatfsdp.retain_host_memory()
    case, count = MODELS[name], EACH * RANKS
    models = {
        way: FullyShardedDataParallel(
            case.build(), auto_wrap_policy={case.unit}, use_orig_params=True, deterministic_sums=way != "off"
        )
        for way in WAYS
    }
    optimizers = {way: torch.optim.AdamW(model.parameters()) for way, model in models.items()}
    batches = [case.batch(index, 0) for index in range(count)]

    def step(way: str) -> None:
        model = models[way]
        for number in range(EACH):
            index = number * RANKS + rank if way == "in turns" else rank * EACH + number
            last = number == EACH - 1 or reduced == "each time"
            with nullcontext() if last else model.no_sync():
                if way == "off":
                    (model(*batches[index]) / EACH).backward()
                else:
                    with flatfsdp.microbatch(index, of=count):
                        model(*batches[index]).backward()
        model.clip_grad_norm_(1.0)
        optimizers[way].step()
        optimizers[way].zero_grad()

    found: dict[str, Any] = {way: {"wall": [], "cpu": []} for way in WAYS}
    for number in range(WARMUP + STEPS):
        for way in WAYS:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step(way)
            cpu = time.process_time() - cpu
            dist.barrier()
            if number >= WARMUP:
                found[way]["wall"].append(time.perf_counter() - wall)
                found[way]["cpu"].append(cpu)
    for way, model in models.items():
        found[way]["peak"] = sum(flatfsdp.stats(model).bytes_at_peak.values())
    return {**found, "process_cpu": time.process_time()}


def render(results: dict[str, Any]) -> str:
    """The table, with a description of the measurement."""
    machine = results["machine"]
    how = (
        f"{RANKS} ranks on gloo, one thread each, {EACH} microbatches of each rank in a step, clipping, AdamW. Copies "
        "of the model with and without `deterministic_sums` take turns step by step in the same processes, which "
        "retain host memory, as those of the trainer do. Ratios are medians of "
        f"{STEPS} steps, each over the step before it without, then of rounds, lowest and highest in brackets."
    )
    lines = ["# The same bits on any number of ranks", "", machine_line(machine), ""]
    lines += [f"Made by `{machine['command']}`: {how}", "", *load_lines(results["load"])]
    return "\n".join([*lines, *table_of(results["same_bits"])]).rstrip() + "\n"


def table_of(cells: list[Cell]) -> list[str]:
    """A row for each model, exchange and way, and a line for each that failed."""
    rows = []
    done = [cell for cell in cells if "ranks" in cell]
    for model, setting in dict.fromkeys((cell["model"], cell["engine"]) for cell in done):
        for way, title in WAYS.items():
            of = [c["ranks"] for c in done if (c["model"], c["engine"]) == (model, setting)]
            times = [1e3 * median(ranks[0][way]["wall"]) for ranks in of]
            row = [model, setting, title, _spread(Spread.of(times), 1)]
            for kind in ("wall", "cpu"):
                row.append(_spread(Spread.of([_ratio(ranks, way, kind) for ranks in of]), 3) if way != "off" else "")
            rows.append([*row, f"{of[0][0][way]['peak'] / 2**20:.1f}"])
    header = [
        "model",
        "exchange, reduced",
        "microbatches",
        "step, ms",
        "wall : without",
        "CPU : without",
        "MiB at peak",
    ]
    failed = [f"{cell['model']}, {cell['engine']}: {cell['error']}" for cell in cells if "error" in cell]
    return [*markdown(header, rows), *failed]


def _ratio(ranks: list[Any], way: str, kind: str) -> float:
    """Step by step over those without: of the first rank's wall clock, which barriers end, or of all CPU time."""
    of = ranks[:1] if kind == "wall" else ranks
    steps = [[sum(each) for each in zip(*(rank[name][kind] for rank in of), strict=True)] for name in (way, "off")]
    return median(one / other for one, other in zip(*steps, strict=True))


def _spread(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"
