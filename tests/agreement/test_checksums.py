"""Checksums of values."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from flatfsdp.engine.agreement.checksums import AT_ONCE, checksum

pytestmark = pytest.mark.single_process


def test_a_checksum_of_a_large_parameter_takes_little_memory() -> None:
    """torch copies what it sums up into int64: in one piece, twice the parameter."""
    large = torch.randn(5 * AT_ONCE + 3)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        found = checksum(large)
    assert found == int(large.view(torch.int32).sum(dtype=torch.int64))
    assert max(event.cpu_memory_usage for event in recorded.events()) <= 8 * AT_ONCE


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex128], ids=str)
def test_any_bit_counts(dtype: torch.dtype) -> None:
    values = torch.ones(3, dtype=dtype)
    other = values.clone()
    other[1] = 0
    assert checksum(values) == checksum(values.clone()) != checksum(other)
    assert checksum(values[:0]) == 0
