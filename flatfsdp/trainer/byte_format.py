"""Numbers of bytes with binary units."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_in_words(count: int) -> str:
    """With the binary unit that suits it and three digits: "1.25 GiB"."""
    power = _power(count)
    number = count / 1024**power
    return f"{number:.{0 if power == 0 or number >= 100 else 1 if number >= 10 else 2}f} {_UNITS[power]}"


def sizes_in_words(*counts: int) -> str:
    """Several, with the unit that suits the largest: "0.8, 1.6 MiB"."""
    power = _power(max(counts))
    return f"{', '.join(f'{count / 1024**power:.{1 if power else 0}f}' for count in counts)} {_UNITS[power]}"


def _power(count: int) -> int:
    return min(max(int(count).bit_length() - 1, 0) // 10, len(_UNITS) - 1)
