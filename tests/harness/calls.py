"""Cost measured in calls, independent of other programs on the machine."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any


def calls_by_file(work: Callable[[], object]) -> Counter[str]:
    """Python functions entered and generators resumed by `work`, by the path of their file."""
    found: Counter[str] = Counter()

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            found[frame.f_code.co_filename] += 1

    gc.collect()  # so that finalizers of earlier tests are not counted
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


def calls_of(work: Callable[[], object], *, inside: str = "") -> int:
    """The number of these calls, in files whose path begins with `inside`."""
    return sum(count for file, count in calls_by_file(work).items() if file.startswith(inside))
