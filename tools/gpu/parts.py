"""The parts, in the order in which they run: what matters most first, since the budget may end before the last."""

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
        title: of its table.
        seconds: after which it is ended.
        module: has ``run(report, card, brief)``; "tools.gpu." is left out.
        argument: one more for ``run``, where several parts share a module.
    """

    name: str
    title: str
    seconds: float
    module: str
    argument: str = ""

    def run(self, report: Report, card: Card, *, brief: bool) -> None:
        """In this process. ``brief``: the least that shows that it runs."""
        module = importlib.import_module(f"tools.gpu.{self.module}")
        more = [self.argument] if self.argument else []
        module.run(report, card, *more, brief=brief)


PARTS = {
    part.name: part
    for part in (
        Part("one_rank", "Parity with one process, one rank", 75, "parity", "one rank"),
        Part("streams", "A step's kernels, copies and overlap", 90, "streams"),
        Part("memory", "Memory of a GPT, beside FSDP1 and FSDP2", 120, "memory"),
        Part("host", "Host time of a step", 60, "host"),
        Part("nccl", "Collectives by NCCL itself", 45, "nccl"),
        Part("two_ranks", "Parity with one process, two ranks on one card through gloo", 90, "parity", "two ranks"),
        Part("compiled", "Parity under torch.compile", 60, "compiled"),
        Part("memcheck", "compute-sanitizer memcheck", 75, "sanitizer", "memcheck"),
        Part("graphs", "CUDA graphs", 30, "graphs"),
        Part("racecheck", "compute-sanitizer racecheck", 60, "sanitizer", "racecheck"),
    )
}
