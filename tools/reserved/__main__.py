"""Print, beside what was measured on a card, the memory of a GPT of 1B parameters that the model predicts.

Without options: all engines, as one of 8 ranks and alone, which takes minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from flatfsdp.engine.inspection.allocator import MIB, Settings

from .models import CASES
from .training import Figures, measure

ENGINES = ("flatfsdp", "flatfsdp-orig", "flatfsdp-front", "fsdp1", "fsdp2")
WORLDS = {8: "fake group of 8", 1: "one rank"}
COLUMNS = {"in use": "in_use", "reserved": "reserved", "between": "between"}
MEASURED = Path(__file__).parents[1] / "bench_results" / "gpu" / "results.json"


def measured(model: str, ranks: int) -> dict[str, Any]:
    """Engine to figure to bytes, on a card; nothing for a model that was not there."""
    parts = json.loads(MEASURED.read_text())["parts"]
    figures: dict[str, Any] = next(part["figures"] for part in parts if part["part"] == "memory")
    return figures[WORLDS[ranks]] if model == next(iter(CASES)) else {}


def row(engine: str, found: Figures, card: dict[str, int]) -> list[str]:
    """Predicted and measured MiB of each column, and by how much the prediction is off; reserved as a part of used."""
    cells = [engine]
    for name, field in COLUMNS.items():
        mine, theirs = getattr(found, field), card.get(name)
        cells += [f"{mine / MIB:.0f}"] + ([f"{theirs / MIB:.0f}", f"{mine / theirs - 1:+.1%}"] if theirs else ["", ""])
    return [*cells, f"{found.reserved / found.in_use:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.reserved", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--models", nargs="+", choices=CASES, default=[next(iter(CASES))])
    parser.add_argument("--worlds", nargs="+", type=int, choices=WORLDS, default=tuple(WORLDS))
    parser.add_argument("--steps", type=int, default=3, help="steps of training, the last of which is shown")
    parser.add_argument("--expandable", action="store_true", help="with expandable_segments (the card had none)")
    args = parser.parse_args()
    if args.expandable:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # which engines look at, too
    settings = Settings.of_environment()
    header = ["engine", *(f"{name}{part}" for name in COLUMNS for part in ("", ", card", ", off by")), "of in use"]
    for model, ranks in itertools.product(args.models, args.worlds):
        print(f"\n### {model}, {WORLDS[ranks]}: MiB\n")
        print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
        for engine in args.engines:
            fresh = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))  # engines leave state behind
            with fresh:
                job = fresh.submit(measure, CASES[model], engine, ranks, args.steps, settings)
                found = job.result()
            print(f"| {' | '.join(row(engine, found, measured(model, ranks).get(engine, {})))} |", flush=True)


if __name__ == "__main__":
    main()
