"""`tools/bench`: flatfsdp beside torch's FSDP1, FSDP2, DDP and a process without communication, in one table.

Two ranks on gloo, one thread each, every measurement in fresh processes. It writes table.md, results.json and plot.png.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from . import memory, rounds
from .engines import ENGINES
from .machine import ROOT, describe
from .models import MODELS
from .table import render

RESULTS = ROOT / "tools" / "bench_results"
SKETCH = Path("/tmp/flatfsdp-bench")
QUICK = ("small", "mlp")


def names(known: dict[str, Any]) -> Any:
    """The type of an argument that lists some of ``known``."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
        return chosen

    return parse


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="tools/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models, engines = ", ".join(MODELS), ", ".join(ENGINES)
    add = parser.add_argument
    add("--models", type=names(MODELS), metavar="A,B", help=f"of {models} (default: all)")
    add("--engines", type=names(ENGINES), metavar="A,B", default=list(ENGINES), help=f"of {engines} (default: all)")
    add("--rounds", type=int, help="how often engines take turns (default: 3; 1 with --quick)")
    add("--steps", type=int, help="timed steps per round (default: by model; 2 with --quick)")
    add("--quick", action="store_true", help=f"for a look: {', '.join(QUICK)}, one round, few steps")
    add("--out", type=Path, metavar="FOLDER", help=f"where to write (default: {RESULTS.name}; {SKETCH} with --quick)")
    given = parser.parse_args()
    given.models = given.models or (list(QUICK) if given.quick else list(MODELS))
    given.rounds = given.rounds or (1 if given.quick else 3)
    given.steps = given.steps or (2 if given.quick else None)
    given.out = given.out or (SKETCH if given.quick else RESULTS)
    return given


def main() -> int:
    """Measure, and write what was found."""
    given = arguments()
    cases = [MODELS[name] for name in given.models]
    if not memory.preload():
        print("no C compiler (cc): the table has no bytes of live tensors", file=sys.stderr)
    command = f"tools/bench {shlex.join(sys.argv[1:])}".strip()
    results: dict[str, Any] = {"machine": {**describe("cpu"), "command": command}}
    results["models"] = [{"name": case.name, "unit_bytes": case.unit_bytes()} for case in cases]
    results |= rounds.time_rounds(cases, given.engines, given.rounds, given.steps)
    results["figures"] = rounds.inspect_all(cases, given.engines)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "results.json").write_text(json.dumps(results) + "\n")
    text = render(results)
    (given.out / "table.md").write_text(text)
    print("", text, f"Written to {given.out}", sep="\n")
    return 1 if any("error" in cell for cell in [*results["cells"], *results["figures"]]) else 0


if __name__ == "__main__":
    sys.exit(main())
