"""The card, as the parts use it, and a substitute for trying parts on a CPU."""

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
        backend: the backend of process groups of one rank.
        is_real: whether there are kernels and an allocator to inspect.
    """

    kind, backend, is_real = "cuda", "nccl", True

    @property
    def device(self) -> torch.device:
        """The only card in use."""
        return torch.device(self.kind, 0)

    def begin(self) -> None:
        """Use the card in this process, for any rank."""
        torch.cuda.set_device(self.device)
        torch.cuda.init()

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize()

    def spin(self, milliseconds: float) -> None:
        """Keep the current stream busy, without blocking the host."""
        torch.cuda._sleep(int(milliseconds * gpu.cycles_per_ms()))

    def free_bytes(self) -> int:
        """The free bytes of the card."""
        return torch.cuda.mem_get_info()[0]

    def allocated(self) -> int:
        """Bytes held by tensors now."""
        return torch.cuda.memory_allocated()

    def peaks(self) -> tuple[int, int]:
        """The peaks of bytes allocated and reserved since `forget_peaks`."""
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def peak_in_use(self) -> int:
        """The peak since `forget_peaks` of bytes held by tensors or, already freed, still in use by another stream."""
        return torch.cuda.memory_stats().get("active_bytes.all.peak", 0)

    def forget_peaks(self) -> None:
        """Measure peaks from here on."""
        torch.cuda.reset_peak_memory_stats()

    def retries(self) -> int:
        """The number of times that the allocator had to release memory and retry, since the start."""
        return torch.cuda.memory_stats().get("num_alloc_retries", 0)

    def give_back(self) -> None:
        """Release unreferenced memory to other processes."""
        gc.collect()
        torch.cuda.empty_cache()

    def refusing_to_wait(self) -> AbstractContextManager[None]:
        """Inside, operations of torch that would block the host until the device has finished raise."""
        return _refusing_to_wait()

    def recording(self) -> AbstractContextManager[None]:
        """Inside, the allocator records the stacks of allocations, for `snapshot`."""
        return _recording()

    def snapshot(self) -> dict[str, Any]:
        """The blocks of the allocator, and its events while it was `recording`."""
        return torch.cuda.memory._snapshot()


class NoCard(Card):
    """A CPU in the place of a card: everything runs, and figures that need a card are 0."""

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
