"""The bytes requested: pages that lie entirely inside a block, of blocks on the CPU alone."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from flatfsdp.engine.device import huge_pages
from flatfsdp.engine.device.huge_pages import LEAST, SIZE, advise, adviser_for

pytestmark = pytest.mark.single_process


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
    with patch.object(huge_pages, "_madvise", lambda: lambda *_: 0):
        assert adviser_for(torch.device("cpu"), LEAST) is advise
        assert adviser_for(torch.device("cpu"), LEAST - 1) is None
        assert adviser_for(torch.device("cuda"), LEAST) is None
    with patch.object(huge_pages, "_madvise", lambda: None):
        assert adviser_for(torch.device("cpu"), LEAST) is None
