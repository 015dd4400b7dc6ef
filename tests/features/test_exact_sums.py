"""Sums of powers that do not depend on the order of elements, or on which rank has which."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from flatfsdp.engine.features import exact_sums
from flatfsdp.engine.features.exact_sums import scale_for, side_by_side, sum_of_powers, value_of

pytestmark = pytest.mark.single_process


def drawn(exponent: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many magnitudes, of which the middle one is 10 ** exponent."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(70_001, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** (exponent + 4 * torch.rand(70_001, generator=generator))).to(dtype)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("exponent", [-30, 0, 30])
def test_any_order_and_any_parts(p: int, exponent: int) -> None:
    values = drawn(exponent)
    scale = scale_for(values.abs().amax())
    whole = sum_of_powers([values], p, scale)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(1))
    parts = sum_of_powers(values[order].split([7, 0, 69_000, 994]), p, scale)
    of_two_ranks = sum_of_powers([values[5:]], p, scale) + sum_of_powers([values[:5]], p, scale)
    with patch.object(exact_sums, "IN_CACHES", 1000):
        small = sum_of_powers([values], p, scale)
    found = value_of(whole)
    assert all(torch.equal(found, value_of(other)) for other in (parts, of_two_ranks, small))
    exact = ((values.double() * scale).abs() ** p).sum()
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=0.0)


def test_the_order_of_plain_sums_shows() -> None:
    """What the test above compares would differ."""
    squares = drawn(0).square()
    sums = {float(squares[:at].sum() + squares[at:].sum()) for at in range(1000, 60_000, 1000)}
    assert len(sums) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    values = drawn(0).to(dtype)
    scale = scale_for(values.abs().amax())
    found = value_of(sum_of_powers(side_by_side([values[:3], values[3:]]), 2, scale))
    exact = (values.to(torch.complex128).abs() * scale).square().sum()
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("largest", [1e-280, 1e-45, 0.75, 1.0, 3.1, 3e38, 1.7e308])
def test_the_largest_becomes_one(largest: float) -> None:
    scale = scale_for(torch.tensor(largest, dtype=torch.float64))
    assert abs(largest * float(scale) - 1.0) < 1e-14
    found = value_of(sum_of_powers([torch.tensor([largest, -largest], dtype=torch.float64)], 2, scale))
    assert float(found.sqrt() / scale) == pytest.approx(largest * math.sqrt(2), rel=1e-12)


def test_zeros_have_no_norm() -> None:
    scale = scale_for(torch.zeros(()))
    assert not sum_of_powers([torch.zeros(3)], 2, scale).any()


def test_a_model_of_a_trillion_parameters_is_added_up() -> None:
    """The sums of a rank, as often as ranks have such ones: of equal elements they are the largest ones."""
    values = [torch.ones(2**10 + 1), torch.full((1,), 2.0**-20)]
    for most in (exact_sums.IN_CACHES, 3):
        with patch.object(exact_sums, "IN_CACHES", most):
            sums = sum_of_powers(values, 2, scale_for(torch.ones(())))
        ranks = 2**20
        assert float(value_of(sums * ranks)) == 2.0**30 + 2.0**20 + 2.0**-20
        assert torch.equal(value_of(sums * ranks), value_of(sum_of_powers(values, 2, torch.ones(())) * ranks))


def test_neighbors_in_one_memory_are_one_tensor() -> None:
    memory = torch.arange(24.0)
    one, two, apart, three = memory[:6].view(2, 3), memory[6:6], memory[7:9], memory[9:]
    found = side_by_side([one, memory[6:7], two, three, memory[10:20:2], apart, torch.arange(3)])
    assert [each.tolist() for each in found] == [
        [*range(7)],
        [],
        [*range(9, 24)],
        [10, 12, 14, 16, 18],
        [7, 8],
        [0, 1, 2],
    ]
