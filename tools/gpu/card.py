"""The card, as the parts see it; and what stands for it where there is none, so that parts can be tried on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from tools.benchmark import gpu

MIB = 2**20


class Card:
    """One accelerator of CUDA.

    Attributes:
        kind: the device type.
        backend: of process groups of one rank.
        is_real: whether there are kernels and an allocator to look at.
    """

    kind, backend, is_real = "cuda", "nccl", True

    @property
    def device(self) -> torch.device:
        """The only card that is used."""
        return torch.device(self.kind, 0)

    def begin(self) -> None:
        """Use the card in this process, whatever its rank is."""
        torch.cuda.set_device(self.device)
        torch.cuda.init()

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize()

    def spin(self, milliseconds: float) -> None:
        """Keep the current stream busy, and not the host."""
        torch.cuda._sleep(int(milliseconds * gpu.cycles_per_ms()))

    def free_bytes(self) -> int:
        """What is free on the card."""
        return torch.cuda.mem_get_info()[0]

    def allocated(self) -> int:
        """Bytes that tensors hold now."""
        return torch.cuda.memory_allocated()

    def peaks(self) -> tuple[int, int]:
        """The most bytes allocated and reserved since `forget_peaks`."""
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def peak_in_use(self) -> int:
        """The most bytes since `forget_peaks` that tensors held or, freed already, another stream was still using."""
        return torch.cuda.memory_stats().get("active_bytes.all.peak", 0)

    def forget_peaks(self) -> None:
        """Measure peaks from here on."""
        torch.cuda.reset_peak_memory_stats()

    def retries(self) -> int:
        """How often the allocator had to give memory back and try again, since the start."""
        return torch.cuda.memory_stats().get("num_alloc_retries", 0)

    def give_back(self) -> None:
        """What nothing holds any more is free for others."""
        gc.collect()
        torch.cuda.empty_cache()

    def refusing_to_wait(self) -> AbstractContextManager[None]:
        """Inside, an operation of torch that would keep the host until the device is through raises."""
        return _refusing_to_wait()

    def recording(self) -> AbstractContextManager[None]:
        """Inside, the allocator notes who takes memory, and `snapshot` has it."""
        return _recording()

    def snapshot(self) -> dict[str, Any]:
        """What the allocator holds, and what it did while it was `recording`."""
        return torch.cuda.memory._snapshot()


class NoCard(Card):
    """A CPU in the place of a card: everything runs, and what only a card can tell is 0."""

    kind, backend, is_real = "cpu", "gloo", False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def begin(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def free_bytes(self) -> int:
        return 0

    def allocated(self) -> int:
        return 0

    def peaks(self) -> tuple[int, int]:
        return 0, 0

    def peak_in_use(self) -> int:
        return 0

    def forget_peaks(self) -> None:
        pass

    def retries(self) -> int:
        return 0

    def give_back(self) -> None:
        gc.collect()

    def refusing_to_wait(self) -> AbstractContextManager[None]:
        return nullcontext()

    def recording(self) -> AbstractContextManager[None]:
        return nullcontext()

    def snapshot(self) -> dict[str, Any]:
        return {"segments": [], "device_traces": [[]]}


def card_of(kind: str) -> Card:
    """The card of that kind: "cuda" or "cpu"."""
    return Card() if kind == "cuda" else NoCard()


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def _recording() -> Iterator[None]:
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=1_000_000)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
