"""Huge pages for large blocks of host memory, which the C library requests from the operating system each time.

A block of more than 32 MiB is mapped again at each allocation, and its pages of 4 KiB are zeroed and mapped one by one
at their first write. With pages of 2 MiB this takes a fifth of the time. Most distributions provide huge pages on
request (`/sys/kernel/mm/transparent_hugepage/enabled` is "madvise"). The request covers only pages completely inside a
block, so it takes no more memory than was allocated.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from ..device.memory import MemoryTracker

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SIZE = 2 * 1024 * 1024  # of a huge page; without effect on machines whose pages are larger than 4 KiB
LEAST = 2 * SIZE  # bytes of the smallest block for which huge pages are requested; the C library reuses smaller ones
_ADVICE = 14  # MADV_HUGEPAGE


def tracker_for(device: torch.device) -> MemoryTracker:
    """A tracker that has huge pages requested for what it counts on `device`, if that has an effect."""
    if device.type == "cpu" and _madvise() is not None:
        return MemoryTracker(_advise_tensor, LEAST)
    return MemoryTracker()


def _advise_tensor(tensor: torch.Tensor) -> None:
    if type(tensor) is torch.Tensor and tensor.device.type == "cpu":  # no fake tensor of a dry run
        advise(tensor.data_ptr(), tensor.nbytes)


def advise(address: int, size: int) -> None:
    """Request huge pages for `size` bytes from `address` on; failures are ignored."""
    madvise = _madvise()
    first, end = -(-address // SIZE) * SIZE, (address + size) // SIZE * SIZE
    if madvise is not None and first < end:
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _ADVICE)


@lru_cache
def _madvise() -> Callable[..., object] | None:
    """The C function `madvise` if the kernel provides huge pages on request; None otherwise."""
    try:
        by_request = sys.platform == "linux" and "[madvise]" in SETTING.read_text()
    except OSError:
        by_request = False
    return ctypes.CDLL(None).madvise if by_request else None
