"""Large pages for memory of the host that comes from the operating system each time it is taken.

A block of more than 32 MiB is mapped anew at each allocation, and its pages of 4 KiB are zeroed and mapped one by one
as they are first written. In pages of 2 MiB that takes a fifth of the time above what writing itself takes. Most
distributions give them on request (`/sys/kernel/mm/transparent_hugepage/enabled` is "madvise"); the request
holds for the pages that lie whole inside a block, so no byte more is taken than was allocated.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SIZE = 2 * 1024 * 1024  # of a large page; where pages of the machine are larger than 4 KiB, it is ineffective
LEAST = 2 * SIZE  # bytes of a block below which the C library hands out what it has kept
_ADVICE = 14  # MADV_HUGEPAGE


def adviser_for(device: torch.device, size: int) -> Callable[[int, int], object] | None:
    """What requests large pages of a block of `size` bytes on `device`, to be called with its address and size after
    each allocation; None where that has no effect."""
    return advise if size >= LEAST and device.type == "cpu" and _madvise() is not None else None


def advise_tensor(made: torch.Tensor) -> None:
    """The same for the memory of a tensor of at least `LEAST` bytes, which was just allocated."""
    if type(made) is torch.Tensor and (advise := adviser_for(made.device, made.nbytes)) is not None:
        advise(made.data_ptr(), made.nbytes)


def advise(address: int, size: int) -> None:
    """Ask for large pages from `address` on; refusals are of no matter."""
    madvise = _madvise()
    first, end = -(-address // SIZE) * SIZE, (address + size) // SIZE * SIZE
    if madvise is not None and first < end:
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _ADVICE)


@lru_cache
def _madvise() -> Callable[..., object] | None:
    """The C function where the kernel gives large pages on request, else None."""
    try:
        by_request = sys.platform == "linux" and "[madvise]" in SETTING.read_text()
    except OSError:
        by_request = False
    return ctypes.CDLL(None).madvise if by_request else None
