"""Small steps under compute-sanitizer, which sees every access of every kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from . import needs, small_step
from .card import Card
from .parts import ROOT
from .report import Report

GOALS = {"memcheck": "no invalid access", "racecheck": "no hazard in shared memory"}
SECONDS = {"memcheck": 70.0, "racecheck": 55.0}  # a little less than the limit of the part
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def run(report: Report, card: Card, tool: str, *, brief: bool) -> None:
    """Run the steps under ``tool`` of compute-sanitizer; without a card, only the steps."""
    step = [sys.executable, "-m", small_step.__name__, "--device", card.kind]
    path = needs.sanitizer()
    if not card.is_real or path is None:
        report.goal(f"{tool} over small steps", GOALS[tool], "no card" if path else "no compute-sanitizer", None)
        if card.is_real:
            return
        path = None
    command = step if path is None else [path, "--tool", tool, "--print-limit", "20", *step]
    # Then each block is the driver's, so that accesses next to it, or to freed memory, are invalid.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else None
    try:
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS[tool])
    except subprocess.TimeoutExpired:
        report.goal(f"{tool} over small steps", GOALS[tool], f"not through after {SECONDS[tool]:.0f} s", None)
        return
    print(ran.stdout, ran.stderr, sep="\n", flush=True)
    through = small_step.DONE in ran.stdout
    report.goal(
        f"{tool}: the small steps", "run to their end", "they do" if through else ran.stderr.strip()[-300:], through
    )
    if path is not None:
        counts = [int(count) for count in _SUMMARY.findall(ran.stdout + ran.stderr)]
        found = f"{sum(counts)} reported" if counts else "no summary: " + ran.stdout.strip()[-200:]
        report.goal(f"{tool} over small steps", GOALS[tool], found, not sum(counts) if counts else None)
