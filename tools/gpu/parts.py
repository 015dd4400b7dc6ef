"""The parts, in the order in which they run: the most important first, since the budget may not suffice for all."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from .card import Card
from .report import Report

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        title: the title of its table.
        seconds: its time limit.
        module: has ``run(report, card, brief)``; without "tools.gpu.".
        argument: one more for ``run``, where several parts share a module.
        timed: whether its findings depend on time, so that nothing may run at the same time.
    """

    name: str
    title: str
    seconds: float
    module: str
    argument: str = ""
    timed: bool = False

    def run(self, report: Report, card: Card, *, brief: bool) -> None:
        """Run it in this process. ``brief``: only the minimum that shows that it works."""
        module = importlib.import_module(f"tools.gpu.{self.module}")
        more = [self.argument] if self.argument else []
        module.run(report, card, *more, brief=brief)


PARTS = {
    part.name: part
    for part in (
        Part("one_rank", "Parity with one process, one rank", 120, "parity", "one rank"),
        Part("two_ranks", "Parity with one process, two ranks on one card through gloo", 120, "parity", "two ranks"),
        Part("nccl", "Collectives by NCCL itself", 85, "nccl"),
        Part("memory", "Memory of a GPT, beside FSDP1 and FSDP2", 120, "memory", timed=True),
        Part("streams", "A step's kernels, copies and overlap", 110, "streams", timed=True),
        Part("host", "Host time of a step", 80, "host", timed=True),
        Part("compiled", "Parity under torch.compile", 90, "compiled"),
        Part("memcheck", "compute-sanitizer memcheck", 75, "sanitizer", "memcheck"),
        Part("graphs", "CUDA graphs", 75, "graphs"),
        Part("racecheck", "compute-sanitizer racecheck", 75, "sanitizer", "racecheck"),
    )
}
