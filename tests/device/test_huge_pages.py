"""Large units take large pages where the kernel gives them on request: fewer page faults, the same bytes."""

from __future__ import annotations

import resource

import pytest
import torch

from flatfsdp.engine.cpu.huge_pages import tracker_for
from flatfsdp.engine.device.memory import FlatBuffer, MemoryTracker
from tests.harness import fresh

pytestmark = pytest.mark.process

CPU = torch.device("cpu")
BYTES = 64 * 1024 * 1024  # the C library maps such a block again each time


def faults(rank: int, world: int, asks: bool) -> tuple[int, int]:
    """Page faults of taking, filling and freeing a buffer ten times, and the bytes that were live."""
    tracker = tracker_for(CPU) if asks else MemoryTracker()
    buffer = FlatBuffer(BYTES // 4, torch.float32, CPU, tracker=tracker, category="unsharded")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        buffer.allocate()
        buffer.tensor.fill_(1.0)
        buffer.free()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, tracker.peak("unsharded")


def test_a_large_buffer_takes_large_pages() -> None:
    if tracker_for(CPU).advised_from > BYTES:
        pytest.skip("the kernel gives no large pages on request")
    (plain,), (asked,) = fresh.run(1, faults, False, timeout=60), fresh.run(1, faults, True, timeout=60)
    assert plain.error is None, plain.error
    assert asked.error is None, asked.error
    (many, bytes_before), (few, bytes_now) = plain.result, asked.result
    assert many > 10 * BYTES // 4096 * 0.9
    assert few < many / 8  # memory may be too fragmented for some
    assert bytes_now == bytes_before == BYTES
