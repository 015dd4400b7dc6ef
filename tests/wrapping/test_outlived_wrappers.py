"""A wrapper that is gone before the backward of its forward: refused, where nothing would average the gradients."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.corners import seeded

pytestmark = pytest.mark.distributed


def outlived(rank: int, world: int, strategy: str, nested: bool) -> tuple[str, bool]:
    """The error of the backward, and whether the wrapper stays alive."""
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)))
    policy = {nn.Linear} if nested else None
    model: Any = FullyShardedDataParallel(
        net, sharding_strategy=strategy, auto_wrap_policy=policy, use_orig_params=True, sync_module_states=True
    )
    loss = model(torch.ones(2, 4) * (rank + 1)).square().sum()
    gone = weakref.ref(model)
    del model
    gc.collect()
    with pytest.raises(UsageError) as caught:
        loss.backward()
    return str(caught.value), gone() is not None


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_backward_without_its_wrapper_is_refused(pool2: Run, strategy: str) -> None:
    for nested in (False, True):
        for text, stays in pool2(outlived, strategy, nested):
            assert "has been deleted" in text and not stays
