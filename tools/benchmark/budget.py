"""The CPU time of a rank by pieces of a step through shared memory: ``python -m tools.benchmark.budget [ROUNDS]``.

The GPT, FULL_SHARD, two ranks. Pieces are timed inside a step, each without nested pieces. FSDP1 and one process
without communication take turns with it, in fresh processes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any
from unittest.mock import patch

from flatfsdp.engine.cpu.exchange import SharedMemory, SharedWork
from flatfsdp.engine.cpu.operations import Gather, Sum
from flatfsdp.engine.flat.gradient_slots import GradientSlots
from flatfsdp.engine.flat.reduction import ReductionInput
from flatfsdp.engine.transports.pieces import RankPieces

from . import ranks
from .clock import CPU_PHASES
from .jobs import Setting, Training
from .models import MODELS
from .table import markdown

STEPS = 12
# The timed pieces: by name, the class, its method, and the MiB that a step reads or writes in it.
PIECES: dict[str, tuple[type, str, float]] = {
    "own shards into unsharded buffers": (RankPieces, "fill", 79.7),
    "own shards into the outbox": (Gather, "post", 79.7),
    "peers' shards out of outboxes": (Gather, "take", 79.7),
    "gradients from autograd's tensors into their places": (GradientSlots, "_move", 91.8),
    "gradients of peers' shards into the outbox": (Sum, "post", 45.9),
    "sums in rank order": (Sum, "take", 45.9),
    "division by the number of ranks": (ReductionInput, "wait", 45.9),
    "waits for peers": (SharedWork, "wait", 0.0),
    "issuing": (SharedMemory, "_issue", 0.0),
}


class Timers:
    """CPU seconds of timed methods, on every thread."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._local = threading.local()

    def around(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """`plain`, timed without the timed methods that it calls."""
        local = self._local

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, local.inside = getattr(local, "inside", 0.0), 0.0
            begin = time.thread_time()
            try:
                return plain(*args, **kwargs)
            finally:
                spent = time.thread_time() - begin
                self.spent[name] += spent - local.inside
                local.inside = outer + spent

        return timed


def steps(rank: int, engine: str) -> dict[str, float]:
    """CPU milliseconds of a step: medians of the whole and of its phases, means of pieces and of other threads."""
    training = Training(rank, Setting(MODELS["gpt"], engine, "FULL_SHARD"))
    training.warm_up()
    training.step()
    timers = Timers()
    with ExitStack() as stack:
        for name, (owner, method, _) in PIECES.items() if engine == "flatfsdp" else ():
            stack.enter_context(patch.object(owner, method, timers.around(name, getattr(owner, method))))
        begin = time.thread_time(), time.process_time()
        costs = [training.step() for _ in range(STEPS)]
        main = time.thread_time() - begin[0]
        others = time.process_time() - begin[1] - main
    found = {name: spent / STEPS for name, spent in timers.spent.items()} | {"other threads": others / STEPS}
    found |= {name: median(cost[name] for cost in costs) for name in ("cpu", *CPU_PHASES)}
    return {name: 1000 * seconds for name, seconds in found.items()}


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """By engine, medians over rounds of the mean over ranks."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(rounds):
        engines = ["flatfsdp", "fsdp1", "floor"]
        for engine in engines[number % 3 :] + engines[: number % 3]:
            world = ranks.World(1, "") if engine == "floor" else ranks.World(2, "gloo")
            by_rank = ranks.run(world, steps, engine)
            found[engine].append({name: sum(each[name] for each in by_rank) / len(by_rank) for name in by_rank[0]})
    return {
        engine: {name: median(each.get(name, 0.0) for each in cells) for name in cells[0]}
        for engine, cells in found.items()
    }


def table(found: dict[str, dict[str, float]]) -> str:
    """A row for each piece, and for the remaining time."""
    ours, whole, alone = found["flatfsdp"], found["fsdp1"]["cpu"], found["floor"]
    forward, backward, optimizer = (alone[name] for name in CPU_PHASES)
    arithmetic = forward + backward + optimizer / 2
    pieces = {name: ours.get(name, 0.0) for name in (*PIECES, "other threads")}
    rest = ours["cpu"] - arithmetic - sum(pieces.values())
    lines = {"a rank's arithmetic": arithmetic, **pieces, "everything else": rest, "a step": ours["cpu"]}
    rows = []
    for name, spent in lines.items():
        size = PIECES[name][2] if name in PIECES else 0.0
        rows.append([name, f"{spent:.1f}", f"{spent / whole:.3f}", f"{size:.1f}" if size else ""])
    return "\n".join(markdown(("piece", "CPU ms", f"of FSDP1's {whole:.0f}", "MiB"), rows))


if __name__ == "__main__":
    print(table(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 5)))
