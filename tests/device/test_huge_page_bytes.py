"""The bytes requested: pages that lie entirely inside a block, of blocks on the CPU alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp.engine.cpu import huge_pages
from flatfsdp.engine.cpu.huge_pages import LEAST, SIZE, advise, tracker_for
from flatfsdp.engine.device.memory import FlatBuffer
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("address", "size", "expected"),
    [
        (0, 3 * SIZE, [(0, 3 * SIZE)]),
        (1, 3 * SIZE, [(SIZE, 2 * SIZE)]),
        (SIZE - 64, SIZE + 64, [(SIZE, SIZE)]),
        (64, 2 * SIZE - 128, []),
    ],
)
def test_only_whole_pages_inside_the_block(address: int, size: int, expected: list[tuple[int, int]]) -> None:
    asked: list[tuple[int, int]] = []

    def madvise(first: object, count: object, advice: int) -> int:
        asked.append((getattr(first, "value", 0) or 0, getattr(count, "value", 0)))
        return -1  # refused, which is of no matter

    with patch.object(huge_pages, "_madvise", lambda: madvise):
        advise(address, size)
    assert asked == expected


def test_where_it_has_no_effect_nothing_is_requested() -> None:
    asked: list[int] = []

    def take(numel: int, device: torch.device) -> None:
        buffer = FlatBuffer(numel, torch.uint8, CPU, tracker=tracker_for(device), category="unsharded")
        buffer.allocate()

    with patch.object(huge_pages, "_madvise", lambda: lambda first, count, advice: asked.append(count.value)):
        take(LEAST, CPU)
        assert len(asked) == 1
        take(LEAST - 1, CPU)
        take(LEAST, torch.device("cuda"))
    with patch.object(huge_pages, "_madvise", lambda: None):
        take(LEAST, CPU)
    assert len(asked) == 1


@pytest.mark.parametrize("of", [lambda model: model, copy.deepcopy], ids=["built", "copied"])
def test_the_buffers_and_the_results_of_a_model_get_huge_pages(of: Callable[[nn.Module], nn.Module]) -> None:
    asked: list[int] = []
    record = patch.object(huge_pages, "_madvise", lambda: lambda first, count, advice: asked.append(count.value))
    with record, fake_world(2):
        model = of(FSDP(nn.Linear(LEAST // 1024, 512, bias=False)))  # shards of LEAST bytes
        model(torch.ones(1, LEAST // 1024)).sum().backward()
    *buffers, result = asked
    assert LEAST - SIZE <= result <= LEAST < min(buffers) <= max(buffers) <= 2 * LEAST
