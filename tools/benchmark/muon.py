"""A GPT trained with Muon: matrices of the blocks by torch's Muon, everything else by AdamW, under several engines.

In each round engines take turns in fresh processes, so that a slow minute affects all of them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

import flatfsdp
from tools import padding

from .engines import ENGINES, Place
from .jobs import loopback_bytes
from .machine import Watch
from .models import GPT, GPTBlock
from .ranks import World
from .rounds import Cell, attempt, note
from .statistics import Spread, paired_ratio
from .table import load_lines, machine_line, markdown

LENGTH, VOCABULARY = 512, 8192
TOKENS, RANKS = (512, 4096), (2, 4)
WARMUP, STEPS = 2, 3
SETTINGS: dict[str, Any] = {"lr": 0.02, "momentum": 0.95}
Step = Callable[[], Any]


@dataclass(frozen=True)
class Way:
    """An engine, and the step of Muon on its parameters."""

    engine: str
    muon: Callable[[list[nn.Parameter]], Step]
    title: str


def _whole(params: list[nn.Parameter]) -> Step:
    return flatfsdp.matrix_steps(functools.partial(torch.optim.Muon, **SETTINGS), params).optimizer.step


def _torchs(params: list[nn.Parameter]) -> Step:
    return torch.optim.Muon(params, **SETTINGS).step


WAYS = {
    "flatfsdp": Way("flatfsdp-orig", _whole, "flatfsdp, matrix_steps()"),
    "front": Way("flatfsdp-front", _whole, "flatfsdp's fully_shard, matrix_steps()"),
    "fsdp2": Way("fsdp2", _torchs, "FSDP2, torch's Muon on DTensors"),
    "ddp": Way("ddp", _torchs, "DDP, torch's Muon on every rank"),
}
COMPARED = ("fsdp2", "ddp")
PLANNED = {"GPT-OSS-120B": padding.gpt_oss(), "DeepSeek-V3": padding.deepseek_v3()}


def muon_rounds(rounds: int, seconds: float | None) -> Cell:
    """Every way on every number of tokens and ranks, ``rounds`` times or until `seconds` are over; and times of the
    planner of layouts."""
    cells, loads = [], []
    began = time.monotonic()
    planner = {name: padding.seconds_of(units, 128, 1024) for name, units in PLANNED.items()}

    def found(watch: Watch) -> Cell:
        return {"muon": cells, "load": [*loads, watch.end()], "planner": planner}

    for tokens in TOKENS:  # few first: most of the goals are about these
        for number in range(rounds):
            watch = Watch()
            for ranks in RANKS:
                if cells and seconds is not None and time.monotonic() - began > seconds:
                    return found(watch)
                for name in [*WAYS][number % len(WAYS) :] + [*WAYS][: number % len(WAYS)]:
                    cell = attempt(World(ranks, "gloo"), time_muon, name, tokens)
                    cells.append({"round": number, "world": ranks, "tokens": tokens, "engine": name, **cell})
                    watch.used(sum(each["process_cpu"] for each in cell.get("ranks", ())))
                    note(cells[-1])
            loads.append(watch.end())
    return {"muon": cells, "load": loads, "planner": planner}


def time_muon(rank: int, name: str, tokens: int) -> dict[str, Any]:
    """Median wall and CPU seconds of a step, and of Muon's own in it, and bytes through local sockets for each step, of
    all processes. Collective over a gloo world."""
    way = WAYS[name]
    torch.manual_seed(0)
    model: Any = ENGINES[way.engine].wrap(GPT(VOCABULARY, LENGTH), Place(torch.device("cpu"), GPTBlock))
    shapes = flatfsdp.unsharded_shapes(model) if "flatfsdp" in way.engine else None
    matrices, others = [], []
    for each, parameter in model.named_parameters():
        shape = tuple(shapes[each]) if shapes is not None else tuple(parameter.shape)
        (matrices if "blocks" in each and len(shape) == 2 else others).append(parameter)
    muon, adamw = way.muon(matrices), torch.optim.AdamW(others, lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    walls, cpus, steps, step_cpus, losses = [], [], [], [], []
    sent = 0
    for number in range(WARMUP + STEPS):
        ids = torch.randint(VOCABULARY, (tokens // LENGTH, LENGTH + 1), generator=generator)
        if number == WARMUP:
            sent = loopback_bytes()
        torch.distributed.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        before, cpu_before = time.perf_counter(), time.process_time()
        muon()
        steps.append(time.perf_counter() - before)
        step_cpus.append(time.process_time() - cpu_before)
        adamw.step()
        model.zero_grad()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        losses.append(float(loss.detach()))
    found = {"wall": walls, "cpu": cpus, "muon": steps, "muon cpu": step_cpus}
    return {
        **{kind: median(each[WARMUP:]) for kind, each in found.items()},
        "sent": (loopback_bytes() - sent) / STEPS,
        "losses": losses,
        "process_cpu": time.process_time(),
    }


def render(results: dict[str, Any]) -> str:
    """The table, with a description of the measurement."""
    machine = results["machine"]
    how = (
        f"GPT of {sum(each.numel() for each in _meta().parameters()) / 1e6:.0f}M parameters, those of its blocks that "
        f"are matrices by Muon, the others by AdamW; gloo, one thread for each rank; medians of {STEPS} steps, then of "
        "rounds, each in fresh processes, lowest and highest in brackets. Ratios are taken within a round."
    )
    lines = ["# Muon", "", machine_line(machine), "", f"Made by `{machine['command']}`: {how}", ""]
    lines += load_lines(results["load"])
    planner = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in results["planner"].items())
    lines += [
        f"Planning the layouts of a whole model for 1,024 ranks, blocks of 128 rows, on one core: {planner}. "
        "[Their padding](padding.md).",
        "",
    ]
    return "\n".join([*lines, *table_of(results["muon"])]).rstrip() + "\n"


def _meta() -> nn.Module:
    with torch.device("meta"):
        return GPT(VOCABULARY, LENGTH)


def table_of(cells: list[Cell]) -> list[str]:
    """A row for each world, number of tokens and way, and a line for each that failed."""
    rows = []
    done = {(c["round"], c["world"], c["tokens"], c["engine"]): c["ranks"] for c in cells if "ranks" in c}
    rounds = sorted({key[0] for key in done})
    for world in RANKS:
        for tokens in TOKENS:
            for name, way in WAYS.items():
                if not any((number, world, tokens, name) in done for number in rounds):
                    continue
                row = [str(world), f"{tokens:,}", way.title]
                for kind in ("muon", "muon cpu", "wall", "cpu"):
                    row.append(
                        _spread(Spread.of([1e3 * t for t in _times(done, rounds, world, tokens, name, kind)]), 0)
                    )
                row.append(f"{max(_times(done, rounds, world, tokens, name, 'sent')) / 2**20:,.0f}")
                for kind in ("muon", "muon cpu", "wall"):
                    for other in COMPARED:
                        both = [
                            number
                            for number in rounds
                            if {(number, world, tokens, each) for each in (name, other)} <= done.keys()
                        ]
                        pair = [_times(done, both, world, tokens, each, kind) for each in (name, other)]
                        row.append(_spread(paired_ratio(*pair), 2) if both and name not in COMPARED else "")
                rows.append(row)
    header = [
        "ranks",
        "tokens a rank",
        "engine",
        "Muon's step, ms",
        "its CPU, ms",
        "step, ms",
        "its CPU, ms",
        "MiB sent",
    ]
    header += [f"{what} : {other}" for what in ("Muon's step", "its CPU", "step") for other in ("FSDP2", "DDP")]
    failed = [f"{cell['world']} ranks, {cell['engine']}: {cell['error']}" for cell in cells if "error" in cell]
    return [*markdown(header, rows), *failed]


def _times(done: dict[Any, Any], rounds: list[int], world: int, tokens: int, name: str, kind: str) -> list[float]:
    """The longest of all ranks, by round; CPU time of all of them together."""
    join: Any = sum if kind.endswith("cpu") else max
    keys = [(number, world, tokens, name) for number in rounds]
    return [join(rank[kind] for rank in done[key]) for key in keys if key in done]


def _spread(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"
