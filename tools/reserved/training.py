"""Training on a card that does not exist, by each of the engines, as `tools/gpu/memory.py` measures it on a card."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
from torch import nn

from flatfsdp.engine.base import _torch
from flatfsdp.engine.comm.axes import served_as
from flatfsdp.engine.inspection.allocator import Settings
from tools.benchmark.engines import ENGINES, Place
from tools.benchmark.models import Case

from .card import DEVICE, simulated

EARLY = 2  # the step that `tools/gpu/memory.py` looks at first

# torch's optimizers update parameters of other classes than its own one by one. Fake tensors are of no such class.
ONE_BY_ONE = {"flatfsdp"}


class Training:
    """A model under an engine, with its optimizer."""

    def __init__(self, case: Case, engine: str) -> None:
        self.case = case
        with DEVICE:
            made = case.make()
        self.model: nn.Module = ENGINES[engine].wrap(made, Place(DEVICE, case.unit, bf16=True))
        self.optimizer = ENGINES[engine].optimize(self.model)
        for group in self.optimizer.param_groups:
            group["foreach"] = engine not in ONE_BY_ONE

    def step(self) -> None:
        """One step, during which the caller holds the batch."""
        tokens, targets = (torch.zeros(1, self.case.rows).long().to(DEVICE) for _ in range(2))
        self.model(tokens, targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Figures:
    """Bytes at the peak of a step, and between steps; `retries` since the start."""

    in_use: int
    allocated: int
    reserved: int
    between: int
    retries: int


def measure(
    case: Case,
    engine: str,
    ranks: int,
    steps: int = EARLY + 1,
    settings: Settings | None = None,
) -> Figures:
    """What `tools/gpu/memory.py` measures on a card in the last of `steps`. For a process that did not do so before."""
    with _torch.fake_world(ranks, rank=0), served_as("nccl"), simulated(settings) as card:
        training, memory = Training(case, engine), card.allocator
        gc.collect()
        memory.empty_cache()
        for _ in range(steps):
            memory.forget_peaks()
            training.step()
        peaks = memory.active.peak, memory.allocated.peak, memory.reserved.peak
        return Figures(*peaks, memory.allocated.now, memory.retries)
