"""Seeds, and the global random number generators of Python, of torch, and of numpy where it is in use."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed_of(*numbers: int) -> int:
    """A 63-bit seed determined by `numbers`, unrelated to the seeds of other numbers, however close."""
    digest = hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    """Seed the generators, torch's on every device."""
    seed_host(seed)
    torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed the generators on the host."""
    torch.default_generator.manual_seed(seed)  # not `torch.manual_seed`, which reaches into accelerators
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def host_states() -> tuple[Any, ...]:
    """The states of the generators on the host: Python's, torch's, numpy's or None."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.default_generator.get_state(), None if numpy is None else numpy.random.get_state()


def restore_host(of_python: Any, of_torch: torch.Tensor, of_numpy: Any) -> None:
    """Restore such states of the generators on the host."""
    random.setstate(of_python)
    torch.default_generator.set_state(of_torch)
    if (numpy := sys.modules.get("numpy")) is not None and of_numpy is not None:
        numpy.random.set_state(of_numpy)


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """A context that restores the generators on the host at its end."""
    before = host_states()
    try:
        yield
    finally:
        restore_host(*before)
