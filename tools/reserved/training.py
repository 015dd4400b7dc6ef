"""Training on a card that does not exist, by each of the engines, as `tools/gpu/memory.py` measures it on a card."""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - importing it registers the backend "fake"

from flatfsdp.engine.base import overrides
from flatfsdp.engine.inspection.allocator import Settings
from flatfsdp.engine.inspection.assumed import Workspaces, attention
from tools.benchmark.engines import ENGINES, Place
from tools.benchmark.models import Case

from .fake_cuda import DEVICE, KIND, FakeCuda

EARLY = 2  # the step that `tools/gpu/memory.py` looks at first

# torch's optimizers update parameters of other classes than its own one by one. Fake tensors are of no such class.
ONE_BY_ONE = {"flatfsdp"}


@contextmanager
def world(card: FakeCuda, ranks: int) -> Iterator[None]:
    """A process group of `ranks` whose collectives move nothing; torch takes the device for one of CUDA."""
    with ExitStack() as stack:
        stack.enter_context(overrides.without_memory.being(card.memory))
        stack.enter_context(patch("flatfsdp.engine.wrapping.build.compute_device", lambda *args: DEVICE))
        for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            types = [*importlib.import_module(module)._foreach_supported_types, FakeTensor]
            stack.enter_context(patch(f"{module}._foreach_supported_types", types))
        stack.enter_context(patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", lambda: [KIND]))
        served = dist.Backend.backend_capability
        stack.enter_context(patch.dict(served, fake=[*served["fake"], KIND]))
        for module in ("_flat_param", "_runtime_utils"):  # FSDP1's function knows the devices that have streams
            stack.enter_context(
                patch(f"torch.distributed.fsdp.{module}._no_dispatch_record_stream", card.record_stream)
            )
        stack.enter_context(patch.object(torch.nn.functional, "scaled_dot_product_attention", attention))
        card.memory.after = Workspaces(card.memory.storages, card.current_stream).computed
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=ranks)
        try:
            yield
        finally:
            dist.destroy_process_group()


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
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    with FakeCuda(settings) as card, world(card, ranks):
        training, memory = Training(case, engine), card.allocator
        gc.collect()
        memory.empty_cache()
        for _ in range(steps):
            memory.forget_peaks()
            training.step()
        peaks = memory.active.peak, memory.allocated.peak, memory.reserved.peak
        return Figures(*peaks, memory.allocated.now, memory.retries)
