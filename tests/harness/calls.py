"""Time in calls, which no other program on the machine changes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def calls_of(work: Callable[[], object], *, inside: str = "") -> int:
    """Python functions entered and generators resumed by `work`; those of files whose path begins with `inside`."""
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(inside)

    gc.collect()  # or finalisers of earlier tests are counted
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
