"""The host cost of a step, compared with FSDP1 and FSDP2: tiny units in a fake group, so that the device waits."""

from __future__ import annotations

from statistics import median
from typing import Any

from tools.benchmark import host as benchmark
from tools.benchmark import ranks
from tools.benchmark.gpu import FAKE_RANKS

from .card import Card
from .engines import ALONE, OURS, PEERS
from .report import Report

GOALS = {"2": 0.35, "12": 0.45}  # by tensors of a unit: the largest share of either peer's cost
ROUNDS, STEPS = 2, 30


def run(report: Report, card: Card, *, brief: bool) -> None:
    """Measure all engines in turns. The cost of a fake group's collectives is subtracted: unlike real ones, they launch
    a copy for each rank."""
    engines = (OURS[0], PEERS[0]) if brief else (*OURS, *PEERS)
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(1 if brief else ROUNDS):
        for engine in (*engines, benchmark.BARE):
            steps = 2 if brief else STEPS
            try:
                found = ranks.run(
                    ALONE, benchmark.host_microseconds, engine, [FAKE_RANKS], card.kind, steps, timeout=60.0
                )
            except Exception as error:
                report.failed(f"{engine}: host time", "is measured", error)
                continue
            for tensors, by_world in found[0].items():
                times.setdefault(engine, {}).setdefault(tensors, []).append(by_world[str(FAKE_RANKS)])
    middle = {engine: {n: median(values) for n, values in by_n.items()} for engine, by_n in times.items()}
    report.numbers("microseconds per unit", middle)
    rows = [[engine, *(f"{by_n[n]:.0f}" for n in GOALS)] for engine, by_n in middle.items()]
    report.table("Microseconds of the host per unit and step", ("engine", *(f"{n} tensors" for n in GOALS)), rows)
    for engine in OURS:
        for tensors, most in GOALS.items():
            _judge(report, card, engine, tensors, most, middle)


def _judge(report: Report, card: Card, engine: str, tensors: str, most: float, middle: dict[str, Any]) -> None:
    there = [peer for peer in PEERS if peer in middle]
    if engine not in middle or benchmark.BARE not in middle or not there:
        return
    bare = middle[benchmark.BARE][tensors]
    ratios = {peer: (middle[engine][tensors] - bare) / max(middle[peer][tensors] - bare, 1e-9) for peer in there}
    found = ", ".join(f"{ratio:.2f} of {peer}" for peer, ratio in ratios.items())
    met = all(ratio < most for ratio in ratios.values()) if card.is_real else None
    report.goal(f"{engine}: host time per unit of {tensors} tensors", f"below {most}", found, met)
