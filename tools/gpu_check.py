"""What CUDA does and no CPU can show, checked on one GPU in minutes: `python tools/gpu_check.py [--out FILE]`.

1. Losses are those of one process, in float32 and, within its precision, in bf16.
2. The peak of allocated bytes is at most FSDP1's and FSDP2's (a fake group of 8 ranks).
3. Collectives run beside computation: kernels that spin in their place are covered by others.
4. On the lanes of the collectives no kernel copies but the cast into a rank's own slot; in float32 none at all.
5. The allocator never had to give memory back and try again.

Exit status: 0 where all hold, 1 where one does not, 2 without a GPU. Needs torch 2.11 or later and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tools.benchmark import gpu, jobs, ranks
from tools.benchmark.jobs import Setting
from tools.benchmark.machine import describe
from tools.benchmark.models import MODELS, Case, MLPBlock, mlp
from tools.benchmark.ranks import World
from tools.benchmark.statistics import TOLERANCE, distance

MIB = 2**20
OURS, PEERS = ("flatfsdp", "flatfsdp-orig"), ("fsdp1", "fsdp2")
# Large enough that a block computes for longer than a collective spins, and that the host is never what is waited for.
LARGE = Case("large", partial(mlp, 8, 8, 2048), MLPBlock, 8192, 2048, 1)
FAKE = World(gpu.FAKE_RANKS, "fake")
# The first gather and the last reduction of a step have nothing to hide behind; of 24 collectives that leaves 22.
COVERED = 0.8


class Checks:
    """What was found, printed as it is found."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def add(self, what: str, holds: bool, seen: str) -> None:
        """``what`` is promised; ``seen`` is what was measured."""
        self.found.append({"check": what, "holds": holds, "seen": seen})
        print(f"{'ok  ' if holds else 'FAIL'} {what}: {seen}", flush=True)


def check_parity(checks: Checks) -> None:
    """The losses of a world of one rank on NCCL are those of one process."""
    alone = _losses("floor", World(1, ""), bf16=False)
    # Not 0.0: the backward of attention adds in no fixed order, and libraries choose kernels by alignment.
    for bf16, tolerance in ((False, TOLERANCE), (True, 2e-2)):
        for engine in OURS:
            far = distance(_losses(engine, World(1, "nccl"), bf16=bf16), alone)
            checks.add(
                f"{engine}, {'bf16' if bf16 else 'float32'}: losses of one process", far <= tolerance, f"{far:.1e}"
            )


def _losses(engine: str, world: World, *, bf16: bool) -> list[float]:
    setting = Setting(MODELS["gpt"], engine, device="cuda", bf16=bf16)
    return [step["loss"] for step in ranks.run(world, jobs.time_steps, setting, 6)[0]["steps"]]


def check_figures(checks: Checks) -> None:
    """Memory, overlap and copies, in float32 and in bf16."""
    for bf16 in (False, True):
        figures = {
            engine: ranks.run(FAKE, gpu.inspect, Setting(LARGE, engine, device="cuda", bf16=bf16))[0]
            for engine in (*OURS, *PEERS)
        }
        kind = "bf16" if bf16 else "float32"
        least = min(figures[peer]["allocated"] for peer in PEERS)
        others = ", ".join(f"{peer} {figures[peer]['allocated'] / MIB:.0f}" for peer in PEERS)
        for engine in OURS:
            mine = figures[engine]
            name = f"{engine}, {kind}"
            peak = f"{mine['allocated'] / MIB:.0f} MiB; {others}"
            checks.add(f"{name}: peak at most the peers'", mine["allocated"] <= least, peak)
            share = mine["overlap"] or 0.0
            others = ", ".join(f"{peer} {figures[peer]['overlap'] or 0:.0%}" for peer in PEERS)
            checks.add(f"{name}: collectives beside computation", share >= COVERED, f"{share:.0%}; {others}")
            # A cast for each gather, two gathers for each unit.
            allowed = 2 * len(LARGE.unit_bytes()) if bf16 else 0
            copies = mine["on lanes"]["copies"]
            checks.add(f"{name}: copies on lanes", copies <= allowed, f"{copies}, at most {allowed}")
            checks.add(f"{name}: allocator retries", mine["retries"] == 0, str(mine["retries"]))


def main() -> int:
    """All checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write what was found, with date and device, as JSON")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: this machine has no GPU that torch can use", file=sys.stderr)
        return 2
    checks = Checks()
    check_parity(checks)
    check_figures(checks)
    if given.out is not None:
        given.out.write_text(json.dumps({"machine": describe("cuda"), "checks": checks.found}, indent=1) + "\n")
    return 0 if all(check["holds"] for check in checks.found) else 1


if __name__ == "__main__":
    sys.exit(main())
