"""Bytes of tensors on the CPU, exact to the byte: every allocation and release as torch's CPU allocator reports it.

This includes resized storages, temporaries inside one operator and memory held only by autograd, which no traversal of
Python objects can find. The allocator does not report the release of blocks that are older than the recording: so build
the measured objects inside the recording, and `mark` where the measurement begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

_ALLOCATION = "[memory]"
_MARK = "memory mark: "


@dataclass(frozen=True)
class Usage:
    """Bytes live at the start and the end of an interval, and their peak in between."""

    start: int
    peak: int
    end: int


class Recording:
    """Records allocations while it is entered; afterwards, `between` returns the usage between any two marks.

    >>> with Recording() as recording:
    ...     weight = torch.empty(1000)
    ...     recording.mark("built")
    ...     del weight
    >>> recording.between("built")
    Usage(start=4000, peak=4000, end=0)
    """

    def __enter__(self) -> Recording:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._profile.__exit__(*exception)
        results: Any = self._profile.profiler
        events = sorted(results.kineto_results.events(), key=lambda event: event.start_ns())
        memory = [event for event in events if event.name() == _ALLOCATION]
        self._times = [event.start_ns() for event in memory]
        self._live = [0, *accumulate(event.nbytes() for event in memory)]  # before the first, then after each
        self._marks = {e.name()[len(_MARK) :]: e.start_ns() for e in events if e.name().startswith(_MARK)}

    def mark(self, name: str) -> None:
        """Name this moment. A name used again moves to the later moment."""
        with record_function(_MARK + name):
            pass

    def between(self, first: str | None = None, last: str | None = None) -> Usage:
        """Usage from the mark ``first`` (None: the recording's start) to the mark ``last`` (None: its end)."""
        start = 0 if first is None else bisect_left(self._times, self._marks[first])
        stop = len(self._times) if last is None else bisect_left(self._times, self._marks[last])
        return Usage(self._live[start], max(self._live[start : stop + 1]), self._live[stop])


def peak_bytes(fn: Callable[[], object]) -> tuple[int, int]:
    """The increase of live bytes by ``fn()``: at its peak, and at its end with its result still held.

    ``fn`` must not release or resize tensors that existed before the call: use a `Recording` for that.
    """
    with Recording() as recording:
        result = fn()
        recording.mark("end")
    del result
    usage = recording.between(None, "end")
    return usage.peak, usage.end
