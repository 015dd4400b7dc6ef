"""The CRC-32 of a whole from those of its parts, so that several ranks can read one file for it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

# [Note: CRC-32] A CRC is the remainder of the data, read as a polynomial over the integers modulo 2, so that of two
# parts put together is that of the first, times x^(bits of the second), plus that of the second. Polynomials are
# integers of 32 bits here, the highest bit being x^0, as zlib has them.
_MODULUS = 0xEDB88320  # without its x^32
_ONE = 1 << 31
_X = 1 << 30


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of parts, each given as (CRC-32, bytes), one after the other."""
    whole = 0
    for crc32, size in parts:
        whole = _times(_shift(size), whole) ^ crc32
    return whole


@lru_cache(maxsize=64)
def _shift(size: int) -> int:
    """x^(8 * size)."""
    power, square, exponent = _ONE, _X, 8 * size
    while exponent:
        if exponent & 1:
            power = _times(power, square)
        square = _times(square, square)
        exponent >>= 1
    return power


def _times(one: int, other: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_MODULUS if other & 1 else 0)
    return product
