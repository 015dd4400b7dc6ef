"""The first step of training leaves the free memory of an accelerator in one piece. [Note: compaction]"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import flatfsdp
from flatfsdp.engine.base.overrides import without_memory
from flatfsdp.engine.inspection.allocator import Allocator

pytestmark = pytest.mark.single_process

MIB = 2**20
WIDTH, ROWS, LAYERS = 2048, 1024, 8


def layers() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def memory() -> Allocator:
    found: Allocator = without_memory.value.device.allocator
    return found


def trained(between: Callable[[int], object] = id, *, steps: int = 4, microbatches: int = 1) -> Any:
    """A model after `steps` of training; `between` is called after each."""
    model = flatfsdp.FullyShardedDataParallel(layers(), auto_wrap_policy={nn.Sequential})
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        memory().forget_peaks()
        for number in range(microbatches):
            model.set_requires_gradient_sync(number == microbatches - 1)
            model(torch.ones(ROWS, WIDTH)).sum().backward()
        optimizer.step()
        model.zero_grad()
        between(step)
    return model


@pytest.mark.parametrize("microbatches", [1, 3])
def test_after_the_second_step_the_device_is_asked_for_nothing(microbatches: int) -> None:
    taken: list[int] = []
    with flatfsdp.dry_run(8, accelerator=True):
        trained(lambda step: taken.append(memory().segments), steps=5, microbatches=microbatches)
    assert taken[1] == taken[4]


def test_what_is_free_between_steps_lies_in_few_large_pieces() -> None:
    with flatfsdp.dry_run(8, accelerator=True):
        model = trained()
        free = sorted((block.size for block in memory().cached()), reverse=True)
        assert sum(free[:2]) > 0.7 * sum(free)
        assert memory().reserved.peak < 1.15 * memory().active.peak
        del model


def test_an_evaluation_before_training_changes_nothing() -> None:
    with flatfsdp.dry_run(8, accelerator=True):
        model = flatfsdp.FullyShardedDataParallel(layers(), auto_wrap_policy={nn.Sequential})
        requests = memory().segments
        with torch.no_grad():
            model(torch.ones(ROWS, WIDTH))
        assert memory().segments > requests
        assert memory().reserved.now == memory().reserved.peak  # nothing was given back
