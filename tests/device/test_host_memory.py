"""Effects of the allocator call, in a process of its own: its settings are permanent."""

from __future__ import annotations

import resource

import pytest
import torch

from flatfsdp import retain_host_memory
from tests.harness import fresh

pytestmark = pytest.mark.process

BLOCK = 40 * 1024 * 1024  # bytes; glibc maps every block above 32 MiB afresh


def faults(rank: int, world: int, kept: bool) -> tuple[bool, int]:
    """Whether the call took effect, and page faults of freeing a block and taking it again, ten times."""
    took = kept and retain_host_memory()
    storage = torch.empty(0).untyped_storage()

    def take_and_free() -> None:
        storage.resize_(BLOCK)
        storage.fill_(1)
        storage.resize_(0)

    for _ in range(4):  # where one block ended may not suit the next
        take_and_free()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        take_and_free()
    return took, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_memory_that_is_taken_again_is_not_mapped_again() -> None:
    (plain,), (kept,) = fresh.run(1, faults, False, timeout=60), fresh.run(1, faults, True, timeout=60)
    assert plain.error is None, plain.error
    assert kept.error is None, kept.error
    took, count = kept.result
    if took:  # glibc
        assert count < 100
        assert plain.result[1] > 10 * BLOCK // (2 * 1024 * 1024)  # at least once for each huge page
