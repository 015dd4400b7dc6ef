"""The order of measurements: engines take turns within a round, so that a slow minute affects all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import figures, gpu, ranks
from .engines import ENGINES, FLOOR
from .gpu import FAKE_RANKS
from .jobs import Setting, time_exchange, time_steps
from .machine import Watch
from .models import Case
from .ranks import RankFailed, World
from .statistics import joined

RANKS = 2
ALONE = World(1, "")
EXCHANGE = "exchange"  # the pseudo engine that only communicates
JOIN = 2**20  # bytes: the bare exchange joins smaller units with their neighbors
Cell = dict[str, Any]


def world_of(device: str) -> World:
    """The ranks of this machine: on GPUs one for each, otherwise `RANKS`."""
    return World(RANKS, "gloo") if device == "cpu" else World(torch.cuda.device_count(), "nccl")


def round_numbers(rounds: int, seconds: float | None) -> Iterator[int]:
    """0, 1, .. for so many ``rounds``: at least one, and no round that would end later than ``seconds`` from now if it
    took as long as the longest so far."""
    began, longest = time.monotonic(), 0.0
    for number in range(rounds):
        since = time.monotonic()
        if seconds is not None and number and since - began + longest > seconds:
            return
        yield number
        longest = max(longest, time.monotonic() - since)


def time_rounds(
    cases: Sequence[Case],
    engines: Sequence[str],
    rounds: int,
    steps: int | None,
    device: str = "cpu",
    seconds: float | None = None,
) -> Cell:
    """Every engine on every model, ``rounds`` times or as often as `seconds` allow: ``{"cells": [...], "load":
    [...]}``.

    A cell is one (round, model, engine), with the results of `time_steps` on every rank, or the error.
    """
    cells, loads = [], []
    for number in round_numbers(rounds, seconds):
        watch = Watch()
        for case in cases:
            # The order rotates, so that the after-effects of a turn are spread over all engines.
            turn = number % len(engines)
            bare = [EXCHANGE] if device == "cpu" else []
            for engine in [*engines[turn:], *engines[:turn], *bare]:
                count = steps or case.steps
                if engine == EXCHANGE:
                    cell = attempt(world_of(device), time_exchange, joined(case.unit_bytes(), JOIN), count)
                else:
                    world = ALONE if ENGINES[engine].alone else world_of(device)
                    cell = attempt(world, time_steps, Setting(case, engine, device=device), count)
                for rank in cell.get("ranks", []):
                    watch.used(rank["process_cpu"])
                cells.append({"round": number, "model": case.name, "engine": engine, **cell})
                note(cells[-1])
        loads.append(watch.end())
    return {"cells": cells, "load": loads}


def inspect_all(cases: Sequence[Case], engines: Sequence[str], device: str = "cpu") -> list[Cell]:
    """Exact figures of every engine on every model, for each strategy that it supports, on rank 0; and of the model
    alone, whose copies and scalings are subtracted from them."""
    inspect = figures.inspect if device == "cpu" else gpu.inspect
    cells = []
    for case in cases:
        for engine in dict.fromkeys([*engines, FLOOR]):
            for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")[: 2 if ENGINES[engine].sharded else 1]:
                cell = attempt(_world_inspected(engine, device), inspect, Setting(case, engine, strategy, device))
                cells.append({"model": case.name, "engine": engine, "strategy": strategy, **cell})
                note(cells[-1])
    return cells


def _world_inspected(engine: str, device: str) -> World:
    if ENGINES[engine].alone:
        return ALONE
    # A replica has the same size in any world, and DDP reads gradients from works, which a fake group does not fill.
    return World(FAKE_RANKS, "fake") if device == "cuda" and ENGINES[engine].sharded else world_of(device)


def attempt(world: World, job: Any, *args: Any) -> Cell:
    """The results of all ranks, or the error message: a failing engine must not lose the figures of the others."""
    try:
        return {"ranks": ranks.run(world, job, *args)}
    except RankFailed as error:
        return {"error": str(error)}


def note(cell: Cell) -> None:
    """Print one line for a finished measurement."""
    words = [str(value) for key, value in cell.items() if key in ("round", "model", "engine", "strategy", "world")]
    print(*words, "FAILED" if "error" in cell else "", flush=True)
