"""The CRC-32 of a whole from those of its parts."""

from __future__ import annotations

import random
import zlib

import pytest

from flatfsdp.checkpoint.weights import joined

pytestmark = pytest.mark.unit


def test_parts_of_any_size_are_joined_as_the_whole_is() -> None:
    for case in range(50):
        draw = random.Random(case)
        data = draw.randbytes(draw.randrange(3000))
        cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(5)))
        parts = [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert joined((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(data), case
    assert joined([]) == zlib.crc32(b"") == 0


def test_large_parts_take_no_time() -> None:
    zeros = zlib.crc32(bytes(2**20))
    assert joined([(zeros, 2**20)] * 64) == zlib.crc32(bytes(2**26))
