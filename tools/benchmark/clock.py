"""The cost of a step for this process: wall clock by phase, CPU time of all threads, page faults."""

from __future__ import annotations

import resource
import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from .models import Batch

PHASES = ("forward", "backward", "optimizer")
CPU_PHASES = tuple(f"{phase} cpu" for phase in PHASES)


class Clock:
    """Marks in the order of work: of the host's clock on CPU, events of the current stream on an accelerator. Each mark
    also has the CPU time of this process, including all threads of the backend.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self._cpu: list[float] = []

    def mark(self) -> None:
        """Add a mark."""
        self._cpu.append(time.process_time())
        if self._device.type == "cpu":
            self._marks.append(time.perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)

    def laps(self) -> tuple[list[float], list[float]]:
        """Seconds between the marks, of wall clock and of CPU time; waits for the device."""
        cpu = [after - before for before, after in pairwise(self._cpu)]
        if self._device.type == "cpu":
            return [after - before for before, after in pairwise(self._marks)], cpu
        torch.cuda.synchronize(self._device)
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._marks)], cpu


def faults() -> int:
    """Page faults of this process that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, clock: Clock) -> torch.Tensor:
    """Run one training step with a mark before and after each of the `PHASES`. Returned: its loss."""
    clock.mark()
    loss = model(*batch)
    clock.mark()
    loss.backward()
    clock.mark()
    optimizer.step()
    optimizer.zero_grad()
    clock.mark()
    return loss.detach()


def timed_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, device: torch.device
) -> dict[str, float]:
    """Wall and CPU seconds by phase and of the step, page faults, and the loss."""
    clock = Clock(device)
    faults_before = faults()
    loss = train_step(model, optimizer, batch, clock)
    wall, cpu = clock.laps()
    cost = {"step": sum(wall), "cpu": sum(cpu), "faults": faults() - faults_before, "loss": float(loss)}
    return dict(zip(PHASES, wall, strict=True)) | dict(zip(CPU_PHASES, cpu, strict=True)) | cost
