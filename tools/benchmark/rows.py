"""Table rows from raw cells: one row per model and engine, pure functions of the JSON's content."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from .clock import PHASES
from .engines import BASE, ENGINES, FLOOR, TRUTH
from .jobs import WARMUP
from .rounds import EXCHANGE, Cell
from .statistics import TOLERANCE, Spread, distance, paired_ratio

COSTS = (*PHASES, "step", "cpu", "faults")


class Timings:
    """The cells of one model.

    Attributes:
        engines: in the order of the table.
    """

    def __init__(self, cells: Sequence[Cell], model: str) -> None:
        self._cells = {(cell["engine"], cell["round"]): cell for cell in cells if cell["model"] == model}
        names = dict.fromkeys(engine for engine, number in self._cells if number == 0)
        self.engines = [name for name in names if name != EXCHANGE]
        self.rounds = 1 + max((number for _, number in self._cells), default=-1)

    def failure(self, engine: str) -> str | None:
        """The reason for an engine's empty row: it failed, or its losses differ from those of `TRUTH` in its round."""
        for number in range(self.rounds):
            cell = self._cells[engine, number]
            if "error" in cell:
                return str(cell["error"]).strip().splitlines()[-1]
            truth = self._cells.get((TRUTH, number), cell)
            if "error" in truth:
                return f"{TRUTH} failed, so nothing shows whether its losses are right"
            for rank, (ours, right) in enumerate(zip(cell["ranks"], truth["ranks"], strict=False)):
                # One process alone sees one rank's data: losses are comparable only before the first update.
                count = 1 if engine == FLOOR else None
                losses = ([step["loss"] for step in one["steps"][:count]] for one in (ours, right))
                if not (far := distance(*losses)) <= TOLERANCE:
                    return f"INVALID: losses of rank {rank} differ from {TRUTH}'s by {far:.1e} (round {number})"
        return None

    def cells_of(self, engine: str) -> list[Cell]:
        """The cells of `engine`, by round."""
        return [self._cells[engine, number] for number in range(self.rounds)]

    def values(self, engine: str, cost: str) -> list[float]:
        """A cost of one step by round: the median over steps, of the slowest rank; of CPU and faults, the mean."""
        over_ranks = mean if cost.endswith(("cpu", "faults")) else max
        return [
            over_ranks([median([step[cost] for step in rank["steps"][WARMUP:]]) for rank in cell["ranks"]])
            for cell in self.cells_of(engine)
        ]

    def limit(self) -> tuple[list[float], list[float]] | None:
        """Lower bounds for all engines, by round: for wall clock, the longer of one rank's arithmetic and the bare
        exchange; for CPU time, their sum. Arithmetic is one process's forward and backward, and an engine's shortest
        update of this rank's share of the parameters. None where a measurement is missing.
        """
        needed = (FLOOR, EXCHANGE)
        if any("ranks" not in self._cells.get((name, n), {}) for name in needed for n in range(self.rounds)):
            return None
        sharded = [name for name in self.engines if ENGINES[name].sharded and self.failure(name) is None]
        limits = []
        for suffix, both in (("", max), (" cpu", sum)):
            forward, backward = (self.values(FLOOR, phase + suffix) for phase in ("forward", "backward"))
            updates = [self.values(name, "optimizer" + suffix) for name in sharded or [FLOOR]]
            exchange = self.values(EXCHANGE, suffix.strip() or "step")
            compute = [f + b + min(u) for f, b, u in zip(forward, backward, zip(*updates, strict=True), strict=True)]
            limits.append([both(pair) for pair in zip(compute, exchange, strict=True)])
        return limits[0], limits[1]

    def row(self, engine: str) -> dict[str, Any]:
        """Spreads of all costs, ratios to `BASE` and to the limit; only ``failure`` where there is one."""
        failure = self.failure(engine)
        if failure is not None:
            return {"failure": failure}
        row: dict[str, Any] = {cost: Spread.of(self.values(engine, cost)) for cost in COSTS}
        last = self._cells[engine, self.rounds - 1]["ranks"]
        row["resident"] = max(rank["resident_peak"] for rank in last)
        if BASE in self.engines and self.failure(BASE) is None:
            for cost in ("step", "cpu"):
                row[f"{cost} ratio"] = paired_ratio(self.values(engine, cost), self.values(BASE, cost))
        limit = self.limit()
        if limit is not None:
            row["step limit"] = paired_ratio(self.values(engine, "step"), limit[0])
            row["cpu limit"] = paired_ratio(self.values(engine, "cpu"), limit[1])
        return row


def figures_row(cells: Sequence[Cell], model: str, engine: str) -> dict[str, Any]:
    """Exact figures of one engine: memory by strategy, the others for FULL_SHARD, minus the model's own copies."""
    mine = {
        c["strategy"]: c["ranks"][0] for c in cells if (c["model"], c["engine"]) == (model, engine) and "ranks" in c
    }
    alone = next((c["ranks"][0] for c in cells if (c["model"], c["engine"]) == (model, FLOOR) and "ranks" in c), None)
    if "FULL_SHARD" not in mine:
        return {}
    full = mine["FULL_SHARD"]
    # On a GPU the allocator has other figures, in a separate table.
    memory = [key for key in ("peak", "held") if key in full]
    row: dict[str, Any] = {key: {strategy: figures[key] for strategy, figures in mine.items()} for key in memory}
    row |= {"calls": full["calls"], "sent": sum(full["bytes"].values())}
    if alone is not None:
        for phase in ("forward", "backward"):
            row[f"copied {phase}"] = full["copied"].get(phase, 0) - alone["copied"].get(phase, 0)
        row["own slot"] = full["copied"].get("own slot", 0)
        row["scaled"] = full["scaled"] - alone["scaled"]
    return row


def host_row(cells: Sequence[Cell], engine: str) -> dict[str, dict[str, Spread]]:
    """Microseconds per unit and step by number of tensors and by world, over rounds."""
    mine = [cell["ranks"][0] for cell in cells if cell["engine"] == engine and "ranks" in cell]
    if not mine:
        return {}
    return {
        tensors: {world: Spread.of([one[tensors][world] for one in mine]) for world in by_world}
        for tensors, by_world in mine[0].items()
    }
