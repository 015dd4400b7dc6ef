"""A hash of text that is the same on all ranks, for comparisons and for keys of the store."""

from __future__ import annotations

import functools
import hashlib


@functools.lru_cache(maxsize=4096)
def hash63(text: str) -> int:
    """63 bits of a hash of `text`, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
