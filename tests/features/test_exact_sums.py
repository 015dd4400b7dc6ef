"""Sums of powers that do not depend on the order of elements, or on which rank has which."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from flatfsdp.engine.features import exact_sums
from flatfsdp.engine.features.exact_sums import scale_for, sum_of_powers, value_of

pytestmark = pytest.mark.single_process


def drawn(exponent: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many magnitudes, of which the middle one is 10 ** exponent."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(70_001, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** (exponent + 4 * torch.rand(70_001, generator=generator))).to(dtype)


@pytest.mark.parametrize("p", [0, 1, 2, 3, 4, 20, 100])
@pytest.mark.parametrize("exponent", [-30, 0, 30])
def test_any_order_and_any_parts(p: int, exponent: int) -> None:
    values = drawn(exponent)
    scale = scale_for(values.abs().amax())
    whole = sum_of_powers([values], p, scale)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(1))
    parts = sum_of_powers(values[order].split([7, 0, 69_000, 994]), p, scale)
    of_two_ranks = sum_of_powers([values[5:]], p, scale) + sum_of_powers([values[:5].view(5, 1)], p, scale)
    with patch.object(exact_sums, "IN_CACHES", 1000):
        small = sum_of_powers([values.view(1, -1)], p, scale)
    assert torch.equal(whole, parts) and torch.equal(whole, of_two_ranks) and torch.equal(whole, small)
    exact = ((values.double() * scale).abs() ** p if p else (values != 0).double()).sum()
    torch.testing.assert_close(value_of(whole), exact, rtol=1e-13, atol=0.0)


def test_the_order_of_plain_sums_shows() -> None:
    """What the test above compares would differ."""
    squares = drawn(0).square()
    sums = {float(squares[:at].sum() + squares[at:].sum()) for at in range(1000, 60_000, 1000)}
    assert len(sums) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    values = drawn(0).to(dtype)
    scale = scale_for(values.abs().amax())
    found = value_of(sum_of_powers([values[:3], values[3:]], 2, scale))
    exact = (values.to(torch.complex128).abs() * scale).square().sum()
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("largest", [1e-300, 1e-45, 0.75, 1.0, 3.1, 3e38, 1.7e308])
def test_the_largest_becomes_one(largest: float) -> None:
    """So a norm of a high order does not lose it."""
    scale = scale_for(torch.tensor(largest, dtype=torch.float64))
    assert abs(largest * float(scale) - 1.0) < 1e-14
    found = value_of(sum_of_powers([torch.tensor([largest, -largest], dtype=torch.float64)], 100, scale))
    assert float(found ** (1 / 100) / scale) == pytest.approx(largest * 2 ** (1 / 100), rel=1e-12)


def test_zeros_have_no_norm() -> None:
    scale = scale_for(torch.zeros(()))
    assert not sum_of_powers([torch.zeros(3)], 2, scale).any()


def test_a_model_of_a_trillion_parameters_is_added_up() -> None:
    """Digits of a rank, as often as ranks have such ones: equal elements are the largest digits."""
    digits = sum_of_powers([torch.ones(2**10)], 2, scale_for(torch.ones(())))
    assert float(value_of(digits * 2**30)) == 2.0**40
