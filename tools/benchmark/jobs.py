"""The jobs of measured ranks: functions that `ranks.run` starts, one for each kind of figures."""

from __future__ import annotations

import gc
import resource
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .clock import timed_step
from .engines import ENGINES, Place
from .models import Batch, Case

PAGE = resource.getpagesize()
WARMUP = 2  # steps: the first iteration agrees on the order, the second is the first regular one


@dataclass(frozen=True)
class Setting:
    """The measured case: a model under an engine. ``made_there``: initialized on the device, not on the CPU."""

    case: Case
    engine: str
    strategy: str = "FULL_SHARD"
    device: str = "cpu"
    bf16: bool = False
    made_there: bool = False


class Training:
    """A model under an engine with its optimizer, on this rank, ready for its first step. Making it is collective."""

    def __init__(self, rank: int, setting: Setting) -> None:
        self.rank = rank
        self.setting = setting
        self.device = torch.device(setting.device, rank if setting.device == "cuda" else None)
        place = Place(self.device, setting.case.unit, setting.strategy, setting.bf16)
        engine = ENGINES[setting.engine]
        made = setting.case.build(self.device if setting.made_there else "cpu")
        self.model: nn.Module = engine.wrap(made.to(self.device), place)
        self.optimizer = engine.optimize(self.model)
        self.steps = 0

    def batch(self) -> Batch:
        """The next batch of this rank."""
        self.steps += 1
        return tuple(tensor.to(self.device) for tensor in self.setting.case.batch(self.rank, self.steps))

    def step(self) -> dict[str, float]:
        """Run one step, timed."""
        return timed_step(self.model, self.optimizer, self.batch(), self.device)

    def warm_up(self) -> list[dict[str, float]]:
        """Run the first steps, which differ from later ones."""
        return [self.step() for _ in range(WARMUP)]


def time_steps(rank: int, setting: Setting, steps: int) -> dict[str, Any]:
    """Cost and loss of every step, warm-up first; resident bytes; CPU seconds of the whole process; bytes through local
    sockets per step, of all processes of this machine. Collective."""
    training = Training(rank, setting)
    gc.collect()
    costs = training.warm_up()
    before = loopback_bytes()
    costs += [training.step() for _ in range(steps)]
    sent = (loopback_bytes() - before) / steps
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * PAGE
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = {"resident": resident, "resident_peak": peak}
    return {"steps": costs, **memory, "loopback": sent, "process_cpu": time.process_time()}


def loopback_bytes() -> int:
    """The bytes sent through the loopback device of this network namespace so far."""
    with open("/proc/net/dev") as file:
        return next((int(line.split(":")[1].split()[0]) for line in file if line.strip().startswith("lo:")), 0)


def time_exchange(rank: int, sizes: list[int], steps: int) -> dict[str, Any]:
    """Wall and CPU seconds of a step's bare exchange: every one of ``sizes`` (bytes of a unit's parameters, float32) is
    gathered twice and its gradient reduced once, piece by piece between neighbors, without computation. Collective
    over a gloo world.
    """
    costs = []
    units = [_Exchange(size // 4) for size in sizes]
    for _ in range(WARMUP + steps):
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for unit in units:
            unit.gather()
        for unit in reversed(units):
            unit.gather()
            unit.reduce()
        costs.append({"step": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
    return {"steps": costs, "process_cpu": time.process_time()}


class _Exchange:
    """The minimal exchange by gloo for one unit: messages from the owners to the readers, and one sum."""

    def __init__(self, numel: int) -> None:
        self._world, self._rank = dist.get_world_size(), dist.get_rank()
        self._shard = torch.ones(-(-numel // self._world))
        self._pieces = torch.ones(self._shard.numel() * self._world).chunk(self._world)
        self._scratch = torch.empty_like(self._shard)
        self._peers = [peer for peer in range(self._world) if peer != self._rank]

    def gather(self) -> None:
        self._pieces[self._rank].copy_(self._shard)
        works = [dist.irecv(self._pieces[peer], peer) for peer in self._peers]
        works += [dist.isend(self._shard, peer) for peer in self._peers]
        for work in works:
            work.wait()

    def reduce(self) -> None:
        for peer in self._peers:
            works = [dist.irecv(self._scratch, peer), dist.isend(self._pieces[peer], peer)]
            for work in works:
                work.wait()
            self._shard.add_(self._scratch)
