"""Wrappers over modules that torch's tensor parallelism has split."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import Run
from tests.harness.tensor_parallel import seeded, sharded, step_one, step_ours


def trained(rank: int, world: int, shape: tuple[int, ...], steps: int, options: dict[str, Any]) -> list[str]:
    """AdamW under tensor parallelism and a wrapper, against one process."""
    model, one = sharded(shape, **options), seeded()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, one)]
    lines = []
    for step in range(steps):
        found, expected = step_ours(model, shape, step), step_one(one, shape, step)
        if abs(found - expected) > 2e-6:
            lines.append(f"step {step}: loss {found}, expected {expected}")
        norms = [model.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)]
        if not torch.allclose(*norms, rtol=1e-5):
            lines.append(f"step {step}: norm {norms[0]}, expected {norms[1]}")
        for each in optimizers:
            each.step()
            each.zero_grad()
    return lines


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("orig", [True, False])
def test_training_is_that_of_one_process(pool4: Run, orig: bool, sequence: bool) -> None:
    options = {"use_orig_params": orig, "sequence": sequence}
    assert not [line for lines in pool4(trained, (2, 2), 3, options) for line in lines]
