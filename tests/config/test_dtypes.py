"""The dtypes of parameters, computations and reductions."""

from __future__ import annotations

import pytest
import torch

from flatfsdp import MixedPrecision
from flatfsdp.engine.config.precision import resolve

pytestmark = pytest.mark.unit

LOW, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize("master", [torch.complex64, torch.complex128, torch.uint8, torch.bool])
@pytest.mark.parametrize(
    "mixed",
    [
        MixedPrecision(LOW, LOW, keep_low_precision_grads=True),
        MixedPrecision(reduce_dtype=FULL),
        MixedPrecision(accumulate_dtype=FULL),
    ],
    ids=["parameters", "reductions", "sums"],
)
def test_only_real_numbers_are_cast(mixed: MixedPrecision, master: torch.dtype) -> None:
    found = resolve(mixed, master)
    assert {found.master, found.compute, found.reduce, found.accumulate, found.grad} == {master}
