"""Lines above a progress bar, and the width of the terminal."""

from __future__ import annotations

import os
import sys
from typing import TextIO


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
    """How wide the terminal is that `file` is; None where it is none, and lines may have any length."""
    try:
        return os.get_terminal_size(file.fileno()).columns or None
    except (OSError, ValueError):
        return None
