"""The host cost of an engine: CPU time of a step of tiny units in a world whose collectives do nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from .engines import ENGINES, Place
from .models import tiny_case
from .ranks import fake_world
from .rounds import ALONE, Cell, attempt, note

UNITS = 16
BARE = "bare"  # only the collectives of a step
STEPS = 12
TENSORS = (2, 12)


def host_rounds(engines: Sequence[str], worlds: Sequence[int], rounds: int) -> list[Cell]:
    """Microseconds per unit and step, ``{"tensors": {"world": ...}}``, of every engine that works in a fake world."""
    cells = []
    for number in range(rounds):
        for engine in [*engines, BARE]:
            if engine != "ddp":  # it has no units
                cell = attempt(ALONE, host_microseconds, engine, list(worlds))
                cells.append({"round": number, "model": "host", "engine": engine, **cell})
                note(cells[-1])
    return cells


def host_microseconds(
    rank: int, engine: str, worlds: list[int], device: str = "cpu", steps: int = STEPS
) -> dict[str, dict[str, float]]:
    """Median microseconds of forward and backward per unit, by number of tensors in a unit and by world: CPU time; on
    an accelerator, wall clock until the host has issued a step while the device is idle."""
    return {
        str(n): {str(world): _cell(engine, n, world, torch.device(device), steps) for world in worlds} for n in TENSORS
    }


def _cell(engine: str, tensors: int, world: int, device: torch.device, steps: int) -> float:
    case = tiny_case(UNITS, tensors)
    on_host = device.type == "cpu"
    clock, idle = (time.process_time_ns, _nothing) if on_host else (time.perf_counter_ns, torch.cuda.synchronize)
    fake_world(world)
    try:
        if engine == BARE:
            bare = _Collectives(-(-case.unit_bytes()[0] // 4 // world), world, device)
            step, clean = bare, _nothing
        else:
            model = ENGINES[engine].wrap(case.build().to(device), Place(device, case.unit))
            batch = tuple(tensor.to(device) for tensor in case.batch(0, 0))
            step, clean = lambda: model(*batch).backward(), model.zero_grad
        costs = []
        gc.collect()
        for _ in range(3 + steps):
            idle()
            before = clock()
            step()
            costs.append(clock() - before)
            clean()
        return median(costs[3:]) / 1000 / UNITS
    finally:
        dist.destroy_process_group()


def _nothing() -> None:
    pass


class _Collectives:
    """Two gathers and a reduction for each unit."""

    def __init__(self, shard: int, world: int, device: torch.device) -> None:
        self._shard, self._whole = torch.zeros(shard, device=device), torch.zeros(shard * world, device=device)

    def __call__(self) -> None:
        for _ in range(UNITS):
            _gather(self._whole, self._shard)
            _gather(self._whole, self._shard)
            _reduce_scatter(self._shard, self._whole)


# torch renames its flat collectives; the newest name is the one without a deprecation warning.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
