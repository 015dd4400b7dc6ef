"""`tools/bench --shared-memory PART`: ranks that share memory and other engines, in parts of at most ten minutes.

Each part writes its numbers to a separate file; the table is made from all existing files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .engines import ENGINES
from .jobs import Setting, time_exchange, time_steps
from .machine import Watch
from .models import LARGE, MODELS, Case
from .pages import WATCHED, watch_pages
from .ranks import World
from .rounds import EXCHANGE, JOIN, Cell, attempt, note, round_numbers
from .shared_memory_table import render
from .statistics import joined

FOLDER = "shared_memory"  # the folder of the parts' numbers, next to the table
FEW = ("flatfsdp", "fsdp1", "fsdp2", "ddp")


@dataclass(frozen=True)
class Comparison:
    """Engines on one model, over so many ranks.

    Attributes:
        steps: of a round; None for the model's own number.
        pages: measure memory instead of times.
    """

    case: Case
    strategy: str
    ranks: int
    engines: tuple[str, ...]
    steps: int | None = None
    pages: bool = False

    @property
    def title(self) -> str:
        shape = f"2 x {self.ranks // 2}" if self.strategy == "HYBRID_SHARD" else str(self.ranks)
        return f"{self.case.name}, {self.strategy}, {shape} ranks"

    def measure(self, engine: str, steps: int | None) -> Cell:
        """Measure one engine's cell."""
        world, count = World(self.ranks, "gloo"), steps or self.steps or self.case.steps
        if engine == EXCHANGE:
            return attempt(world, time_exchange, joined(self.case.unit_bytes(), JOIN), count)
        world = World(1, "") if ENGINES[engine].alone else world
        setting = Setting(self.case, engine, self.strategy)
        return (
            attempt(world, watch_pages, setting, WATCHED) if self.pages else attempt(world, time_steps, setting, count)
        )


def _of_gpt(strategy: str, ranks: int, *engines: str, **options: Any) -> Comparison:
    return Comparison(MODELS["gpt"], strategy, ranks, engines, **options)


_FRONTS = ("flatfsdp", "flatfsdp-front", "flatfsdp-front-flat")
_ALL = (*_FRONTS, "flatfsdp-orig-flat", "flatfsdp-kept", "flatfsdp-gloo", "fsdp1", "fsdp2", "ddp", "floor", EXCHANGE)
_MORE = (*_FRONTS, "flatfsdp-kept", "fsdp1", "fsdp2", "ddp")
_PAGES = ("flatfsdp", "flatfsdp-gloo", "flatfsdp-kept", "fsdp1", "fsdp2", "ddp")
# By name, the largest number of rounds, and the comparisons.
PARTS: dict[str, tuple[int, tuple[Comparison, ...]]] = {
    "gpt": (9, (_of_gpt("FULL_SHARD", 2, *_ALL),)),
    "models": (9, tuple(Comparison(MODELS[name], "FULL_SHARD", 2, _MORE) for name in ("small", "experts"))),
    "mlp8x": (5, (Comparison(MODELS["mlp8x"], "FULL_SHARD", 2, _MORE),)),
    "strategies": (
        5,
        (
            _of_gpt("SHARD_GRAD_OP", 2, *FEW),
            _of_gpt("NO_SHARD", 2, "flatfsdp", "fsdp1", "ddp"),
            _of_gpt("HYBRID_SHARD", 4, *FEW),
        ),
    ),
    "ranks": (3, tuple(_of_gpt("FULL_SHARD", ranks, "flatfsdp", "fsdp1", "ddp", steps=3) for ranks in (3, 4, 8))),
    "large": (3, (Comparison(LARGE, "FULL_SHARD", 2, FEW),)),
    "memory": (
        3,
        (
            _of_gpt("FULL_SHARD", 2, *_PAGES, pages=True),
            _of_gpt("SHARD_GRAD_OP", 2, "flatfsdp", "flatfsdp-gloo", "fsdp1", "fsdp2", "ddp", pages=True),
            _of_gpt("FULL_SHARD", 4, "flatfsdp", "flatfsdp-gloo", "fsdp1", "ddp", pages=True),
        ),
    ),
}  # fmt: skip


def measure(
    part: str, rounds: int | None, steps: int | None, seconds: float | None, write: Callable[[Cell], None]
) -> Cell:
    """Measure all comparisons of a part in turns; ``write`` gets the results so far after every round."""
    most, comparisons = PARTS[part]
    results: Cell = {"cells": [], "load": [], "pages": []}
    for number in round_numbers(rounds or most, seconds):
        watch = Watch()
        for comparison in comparisons:
            turn = number % len(comparison.engines)
            for engine in [*comparison.engines[turn:], *comparison.engines[:turn]]:
                cell = comparison.measure(engine, steps)
                for rank in cell.get("ranks", []):
                    watch.used(rank["process_cpu"])
                cell = {"round": number, "model": comparison.title, "engine": engine, **cell}
                results["pages" if comparison.pages else "cells"].append(cell)
                note(cell)
        results["load"].append(watch.end())
        write(results)
    return results


def write_part(folder: Path, part: str, results: Cell) -> str:
    """Write the numbers of `part` and the table of all parts. Returned: the table."""
    numbers = folder / FOLDER
    numbers.mkdir(parents=True, exist_ok=True)
    (numbers / f"{part}.json").write_text(json.dumps(results) + "\n")
    found = {name: json.loads(path.read_text()) for name in PARTS if (path := numbers / f"{name}.json").exists()}
    text = render(found)
    (folder / f"{FOLDER}.md").write_text(text)
    return text
