"""`tools/bench`: flatfsdp, torch's FSDP1, FSDP2 and DDP, and a process without communication, in one table.

Two ranks on gloo, one thread each, every measurement in fresh processes. It writes results.md, results.json and
results.png; with --sweep, sweep.md and so on; with --profile, --instructions, --exchange, --muon, --same-bits or
--survive, profile.md and profile.json and so on.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from . import exchange, instructions, memory, muon, profile, rounds, same_bits, shared_memory, survive
from .engines import ENGINES, TRUTH
from .host import host_rounds
from .machine import ROOT, describe
from .models import MODELS, SWEEPS
from .plot import draw, draw_sweep
from .table import render

RESULTS = ROOT / "tools" / "bench_results"
SKETCH = Path("/tmp/flatfsdp-bench")
HOST_WORLDS = (1, 8, 64, 512)
PARTS = ("cells", "figures", "host", "profile", "instructions", "exchange", "pages", "muon", "same_bits", "survive")
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
    add("--models", type=names(MODELS), metavar="A,B", help=f"models to measure, of {models} (default: all)")
    add(
        "--engines", type=names(ENGINES), metavar="A,B", default=list(ENGINES),
        help=f"engines to measure, of {engines} (default: all)",
    )  # fmt: skip
    add("--rounds", type=int, help="number of rounds over all engines (default: 3; 1 with --quick)")
    add("--minutes", type=float, help="start no round that would end after this many (default: no limit)")
    add("--steps", type=int, help="timed steps per round (default: by model; 2 with --quick)")
    add("--quick", action="store_true", help=f"a quick look: {', '.join(QUICK)}, one round, few steps")
    add(
        "--sweep",
        action="store_true",
        help="instead, measure MLP stacks of 1 to 64 units, and of 1 to 8 times the size",
    )
    add(
        "--shared-memory",
        choices=tuple(shared_memory.PARTS),
        help="instead, measure one part of the table of shared memory",
    )
    add("--profile", action="store_true", help="instead, measure whose code takes a step's CPU time (needs py-spy)")
    add(
        "--instructions",
        action="store_true",
        help="instead, count the machine instructions of a unit on the host (needs valgrind)",
    )
    add("--exchange", action="store_true", help="instead, measure a unit's exchanges as one flat tensor, and as a list")
    add("--muon", action="store_true", help="instead, train a GPT with Muon, on 2 and 4 ranks")
    add("--same-bits", action="store_true", help="instead, train with and without deterministic_sums, side by side")
    add("--survive", action="store_true", help="instead, train with and without survive(), in turns")
    add(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: NCCL over all GPUs, and a fake group of 8 ranks"
    )
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"folder to write to (default: {RESULTS.name}; {SKETCH} with --quick)",
    )
    given = parser.parse_args()
    given.models = given.models or (list(QUICK) if given.quick else list(MODELS))
    if TRUTH not in given.engines:
        given.engines.append(TRUTH)  # needed to check the losses of the others
    given.rounds = given.rounds or (1 if given.quick else None if given.shared_memory else 3)
    given.steps = given.steps or (2 if given.quick else None)
    given.out = given.out or (SKETCH if given.quick else RESULTS)
    return given


def main() -> int:
    """Measure, and write the results."""
    given = arguments()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("tools/bench: this machine has no GPU that torch can use", file=sys.stderr)
        return 2
    if given.profile and not profile.is_possible():
        print("tools/bench: --profile needs py-spy, which is not installed: pip install py-spy", file=sys.stderr)
        return 2
    if given.instructions and (missing := instructions.why_not()):
        print(f"tools/bench: {missing}", file=sys.stderr)
        return 2
    kinds = ("profile", "instructions", "exchange", "muon", "same_bits", "survive", "sweep")
    kind = next((kind for kind in kinds if getattr(given, kind)), "results")
    draws = kind in ("sweep", "results")
    if given.shared_memory == "memory":
        memory.return_at_once()
    if given.device == "cpu" and draws and not memory.preload():
        print("there is no C compiler (cc), so the table has no bytes of live tensors", file=sys.stderr)
    command = f"tools/bench {shlex.join(sys.argv[1:])}".strip()
    results: dict[str, Any] = {"machine": {**describe(given.device), "command": command}}
    if given.shared_memory:
        return share_memory(given, results)
    results |= MEASURE[kind](given)
    given.out.mkdir(parents=True, exist_ok=True)
    stem = STEMS.get(kind, kind) + ("-cuda" if given.device == "cuda" else "")
    (given.out / f"{stem}.json").write_text(json.dumps(results) + "\n")
    text = TEXT.get(kind, render)(results)
    if kind == "instructions":
        text += instructions.notes(given.out / f"{stem}.md")
    (given.out / f"{stem}.md").write_text(text)
    if draws:
        (draw_sweep if given.sweep else draw)(results, given.out / f"{stem}.png")
    print("", text, f"Written to {given.out}/{stem}.*", sep="\n")
    return exit_status(results)


def exit_status(results: dict[str, Any]) -> int:
    """The exit status: 1 if any measurement failed."""
    return 1 if any("error" in cell for part in PARTS for cell in results.get(part, [])) else 0


def share_memory(given: argparse.Namespace, results: dict[str, Any]) -> int:
    """Measure one part of the table of shared memory."""
    part, times = given.shared_memory, (given.rounds, given.steps, seconds_of(given))
    write = functools.partial(shared_memory.write_part, given.out, part)
    found = shared_memory.measure(part, *times, lambda found: write(results | found))
    print("", write(results | found), sep="\n")
    return exit_status(found)


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Measure times, figures and host times."""
    cases = [MODELS[name] for name in given.models]
    results: dict[str, Any] = {"models": [{"name": case.name, "unit_bytes": case.unit_bytes()} for case in cases]}
    results |= rounds.time_rounds(cases, given.engines, given.rounds, given.steps, given.device, seconds_of(given))
    results["figures"] = rounds.inspect_all(cases, given.engines, given.device)
    results["host"] = host_rounds(given.engines, HOST_WORLDS[:2] if given.quick else HOST_WORLDS, given.rounds)
    return results


def seconds_of(given: argparse.Namespace) -> float | None:
    """The limit of `--minutes`."""
    return None if given.minutes is None else 60 * given.minutes


def sweep(given: argparse.Namespace) -> dict[str, Any]:
    """Measure times of models of many sizes."""
    cases = {case.name: case for cases in SWEEPS.values() for case in cases.values()}
    sweeps = {title: {size: case.name for size, case in cases.items()} for title, cases in SWEEPS.items()}
    return {
        "sweeps": sweeps,
        **rounds.time_rounds(
            list(cases.values()), given.engines, given.rounds, given.steps, given.device, seconds_of(given)
        ),
    }


def profiles(given: argparse.Namespace) -> dict[str, Any]:
    """Profile the CPU time of steps."""
    return {"profile": profile.profile_all([MODELS[name] for name in given.models], given.engines)}


def counts(given: argparse.Namespace) -> dict[str, Any]:
    """Count machine instructions of steps."""
    chosen = instructions.ENGINES_COUNTED if set(given.engines) == set(ENGINES) else given.engines
    return {"instructions": instructions.count_all([name for name in chosen if name != TRUTH])}  # DDP has no units


def exchanges(given: argparse.Namespace) -> dict[str, Any]:
    """Measure exchanges of lists and exchanges of single tensors."""
    return {"exchange": exchange.exchange_rounds(given.rounds)}


def with_muon(given: argparse.Namespace) -> dict[str, Any]:
    """Train with Muon."""
    return muon.muon_rounds(given.rounds, seconds_of(given))


def with_same_bits(given: argparse.Namespace) -> dict[str, Any]:
    """Train with and without deterministic sums."""
    return same_bits.same_bits_rounds(given.rounds, seconds_of(given))


def with_survive(given: argparse.Namespace) -> dict[str, Any]:
    """Train with and without `survive`."""
    return survive.survive_rounds(given.rounds, seconds_of(given))


MEASURE = {
    "results": compare,
    "sweep": sweep,
    "profile": profiles,
    "instructions": counts,
    "exchange": exchanges,
    "muon": with_muon,
    "same_bits": with_same_bits,
    "survive": with_survive,
}
TEXT = {
    "profile": profile.render,
    "instructions": instructions.render,
    "exchange": exchange.render,
    "muon": muon.render,
    "same_bits": same_bits.render,
    "survive": survive.render,
}
STEMS = {"instructions": "host_instructions"}  # names of files that differ from the name of the part

if __name__ == "__main__":
    sys.exit(main())
