"""Output for people: lines above a progress bar, as wide as the terminal; bytes with binary units; metrics."""

from __future__ import annotations

import os
import sys
from typing import TextIO

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_line(text: str, file: TextIO | None = None) -> None:
    """Print `text` on `file`, stderr by default: above the progress bar, where tqdm draws one."""
    file = sys.stderr if file is None else file
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None:
        print(text, file=file)
    else:
        tqdm.write(text, file=file)
    file.flush()


def columns(file: TextIO) -> int | None:
    """The width of the terminal `file`; None where it is not a terminal, and lines may have any length."""
    try:
        return os.get_terminal_size(file.fileno()).columns or None
    except (OSError, ValueError):
        return None


def size_in_words(count: int) -> str:
    """A number of bytes with a suitable binary unit and three digits: "1.25 GiB"."""
    power = _power(count)
    number = count / 1024**power
    return f"{number:.{0 if power == 0 or number >= 100 else 1 if number >= 10 else 2}f} {_UNITS[power]}"


def sizes_in_words(*counts: int) -> str:
    """Several numbers of bytes, with a unit that suits the largest: "0.8, 1.6 MiB"."""
    power = _power(max(counts))
    return f"{', '.join(f'{count / 1024**power:.{1 if power else 0}f}' for count in counts)} {_UNITS[power]}"


def _power(count: int) -> int:
    return min(max(int(count).bit_length() - 1, 0) // 10, len(_UNITS) - 1)


def shown(value: float) -> str:
    """A metric as text: counts without decimals."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
