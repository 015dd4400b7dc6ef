"""One exchange of a unit: its tensors as one flat tensor, and as the list of segments of `layout="rows"`.

Both use the engine's transport, in turns, in the same processes, so that disturbances affect both equally.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import flatfsdp
from flatfsdp.engine.comm.axes import Axis
from flatfsdp.engine.comm.comm_stats import CommStats
from flatfsdp.engine.device.memory import MemoryTracker
from flatfsdp.engine.device.streams import Device
from flatfsdp.engine.wrapping.exchanges import EXCHANGES

from .ranks import World
from .rounds import Cell, attempt, note
from .statistics import Spread, paired_ratio
from .table import machine_line, markdown

# By unit, the number of elements of each tensor.
UNITS = {
    "7 matrices and 2 norms, 45 MiB": [1024 * 1024] * 4 + [2752 * 1024] * 3 + [1024] * 2,
    "4 matrices and 8 vectors, 6.8 MiB": [384 * 1152, 384 * 384, 384 * 1536, 384 * 1536, 1152, 384, 1536, *[384] * 5],
    "40 vectors, 20 KiB": [128] * 40,
}
WAYS = ("shared memory", "gloo")
KINDS = ("gather", "reduce")
WARMUP, TURNS = 3, 15
RANKS = 2
HOW = (
    f"{RANKS} ranks on gloo, one thread each; CPU time of rank 0 with all threads of the backend, in milliseconds, the "
    f"median of {TURNS} exchanges that take turns with those beside them; in brackets the lowest and the highest of "
    "all rounds, each in fresh processes. A ratio is taken within a round."
)


def exchange_rounds(rounds: int) -> list[Cell]:
    """Measure every unit over every transport, ``rounds`` times: results of `time_lists` by (round, unit, way)."""
    cells = []
    for number in range(rounds):
        for unit in UNITS:
            for way in WAYS:
                cell = attempt(World(RANKS, "gloo"), time_lists, unit, way)
                cells.append({"round": number, "model": unit, "engine": way, **cell})
                note(cells[-1])
    return cells


def time_lists(rank: int, unit: str, way: str) -> dict[str, Any]:
    """Median CPU and wall seconds of exchanges as one tensor and as a list, and the bytes staged by a gather of a list.

    Collective over a gloo world.
    """
    flatfsdp.share_host_memory(way != "gloo")
    stats, device = CommStats(), Device(torch.device("cpu"))
    axis = Axis.of(dist.group.WORLD, device.device)
    over, stream = (
        EXCHANGES.transport(axis, device, comm_stats=stats, tracker=MemoryTracker()),
        device.new_stream("exchange"),
    )
    numels = UNITS[unit]
    flat, full = torch.ones(sum(numels)), torch.ones(sum(numels))
    shard, output = (torch.ones(flat.numel() // RANKS) for _ in range(2))
    segments, fulls = flat.split(numels), full.split(numels)
    pieces = shard.split([numel // RANKS for numel in numels])
    exchanges: dict[str, Callable[[], Any]] = {
        "gather flat": lambda: over.all_gather_base(flat, shard, stream),
        "gather list": lambda: over.all_gather_coalesced(segments, pieces, stream),
        "reduce flat": lambda: over.reduce_scatter_base(output, full, stream),
        "reduce list": lambda: over.reduce_scatter_coalesced(output, fulls, stream),
    }
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in exchanges}
    for _ in range(WARMUP + TURNS):
        for name, exchange in exchanges.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            exchange().wait()
            costs[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    found: dict[str, Any] = {"staged": stats.staged // (2 * (WARMUP + TURNS))}  # reductions stage the same amount
    for name, pairs in costs.items():
        cpu_times, walls = zip(*pairs[WARMUP:], strict=True)
        found[name] = {"cpu": median(cpu_times), "wall": median(walls)}
    return found


def render(results: dict[str, Any]) -> str:
    """The table, with a description of the measurement."""
    machine = results["machine"]
    lines = ["# Exchanges of lists", "", machine_line(machine), "", f"Made by `{machine['command']}`: {HOW}", ""]
    return "\n".join([*lines, *table_of(results["exchange"])]).rstrip() + "\n"


def table_of(cells: list[Cell]) -> list[str]:
    """A row for each unit, way and kind of exchange, and a line for each that failed."""
    rows = []
    for unit in UNITS:
        for way in WAYS:
            found = [c["ranks"][0] for c in cells if (c["model"], c["engine"]) == (unit, way) and "ranks" in c]
            for kind in KINDS if found else ():
                flat, listed = ([each[f"{kind} {how}"]["cpu"] * 1e3 for each in found] for how in ("flat", "list"))
                ratio = paired_ratio(listed, flat)
                figures = map(_spread, (Spread.of(flat), Spread.of(listed), ratio))
                rows.append([unit, way, kind, *figures, str(found[0]["staged"])])
    header = ["unit", "way", "exchange", "as one, ms", "as a list, ms", "ratio", "bytes staged"]
    failed = [f"{cell['model']}, {cell['engine']}: {cell['error']}" for cell in cells if "error" in cell]
    return [*markdown(header, rows), *failed]


def _spread(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"
