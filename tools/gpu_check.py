"""Checks that need CUDA, on one GPU, in at most 8 minutes: `python tools/gpu_check.py`.

It runs the parts listed in tools/gpu/parts.py, each in a separate process with a time limit, and those without timings
side by side. If a part fails, hangs or dies, its findings so far are kept, and the other parts run. The newest results
are always in tools/bench_results/gpu: results.json, results.md (a row for each goal), log.txt and the traces. They show
whether results are right, with every strategy and both fronts; whether memory stays below that of FSDP1 and FSDP2; the
host cost and the kernels of a step; whether collectives overlap with computation; and whether anything waits.

Needs torch 2.11 to 2.13 with CUDA, and compute-sanitizer for two of the parts (COMPUTE_SANITIZER names it if it is in
an unusual place). `--device cpu --brief` tries all parts without a GPU.

Exit status: 0 if no goal is missed, 1 if one is, 2 without a GPU. Unchecked goals are counted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tools.benchmark.machine import describe
from tools.gpu import needs, runner, tables
from tools.gpu.card import Card, card_of
from tools.gpu.parts import PARTS, ROOT, Part
from tools.gpu.report import Findings, Report

RESULTS = ROOT / "tools" / "bench_results" / "gpu"
TRIAL = Path(tempfile.gettempdir()) / "flatfsdp-gpu"  # results of a CPU do not replace a card's
MINUTES = 8.0
START = 0.25  # minutes of the budget for the beginning and the end


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"folder to write to (default: tools/bench_results/gpu; on cpu {TRIAL})",
    )
    add("--minutes", type=float, default=MINUTES, help="time limit of all parts together (default: 8)")
    add(
        "--parts",
        type=_parts,
        default=list(PARTS),
        metavar="A,B",
        help=f"parts to run, of {', '.join(PARTS)} (default: all)",
    )
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the parts without a GPU")
    add("--brief", action="store_true", help="run only enough of each part to show that it works")
    add("--commit", help="the measured commit, if git does not report it")
    return parser.parse_args()


def _parts(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(PARTS)}")
    return chosen


def main() -> int:
    """Run all parts."""
    given = arguments()
    given.out = (given.out or (RESULTS if given.device == "cuda" else TRIAL)).resolve()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: this machine has no GPU that torch can use; --device cpu tries the parts", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    log = given.out / "log.txt"
    log.unlink(missing_ok=True)
    machine = _machine(card_of(given.device), given.commit)
    with tempfile.TemporaryDirectory() as scratch:
        first = _look(Path(scratch) / "needs.json", card_of(given.device))

        def write(outcomes: list[runner.Outcome]) -> None:
            tables.write(given.out, machine, [first, *outcomes])

        def command(part: Part, path: Path) -> list[str]:
            return runner.command_of(part, path, given.out, given.device, given.brief)

        chosen = [part for name, part in PARTS.items() if name in given.parts]
        outcomes = runner.run_all(chosen, command, Path(scratch), log, 60 * (given.minutes - START), write)
    unmet = sum(outcome.unmet for outcome in [first, *outcomes])
    unseen = sum(row.met is None and bool(row.goal) for each in [first, *outcomes] for row in each.found.rows)
    print(f"{unmet} goals are not met, {unseen} could not be checked.", flush=True)
    print(f"Written to {given.out}: results.md, results.json", flush=True)
    return 1 if unmet else 0


def _look(path: Path, card: Card) -> runner.Outcome:
    report = Report(path)
    needs.look(report, card)
    return runner.Outcome("needs", "What is needed", found=Findings.read(path))


def _machine(card: Card, commit: str | None) -> dict[str, Any]:
    found = {**describe(card.kind), "command": f"tools/gpu_check.py {shlex.join(sys.argv[1:])}".strip()}
    if commit:
        found["commit"] = commit
    if card.is_real:
        major, minor = torch.cuda.get_device_capability()
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        found |= {
            "capability": f"{major}.{minor}",
            "memory of the card": torch.cuda.get_device_properties(0).total_memory,
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
