"""The assignment of intervals to the ranks that write them: pure data, the same on every rank.

A rank's *plan* lists the intervals of tensors that it holds (`PlannedInterval`). All plans together determine, for each
tensor, which rank writes which interval, each once, and that every element is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from math import prod
from typing import NamedTuple

from ..engine.layout.layout import ParamSpec
from ..errors import CheckpointError, ranks_in_words
from .nested_state import Path


class PlannedInterval(NamedTuple):
    """An interval of a tensor, which one or more ranks hold.

    `[start, stop)` are elements in memory order (given by `stride` where not row-major). `size` in bytes.
    """

    key: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    start: int
    stop: int
    size: int

    @property
    def spec(self) -> ParamSpec:
        """The spec of the whole tensor."""
        return ParamSpec(self.key, self.shape, self.stride)


def digest(plan: Sequence[PlannedInterval]) -> str:
    """A hash that is equal for equal plans."""
    return hashlib.sha256(repr(tuple(plan)).encode()).hexdigest()


def assign(
    plans: Sequence[Sequence[PlannedInterval]], nodes: Sequence[int], firsts: Collection[str] = ()
) -> list[list[PlannedInterval]]:
    """The intervals that each rank writes, given those that each holds. Of several ranks that hold one, the one with
    the least to write so far writes; of tensors with keys in `firsts`, whose values ranks may not share, the first.

    `nodes` are equal for ranks that share a file system: on each node, everything that its ranks hold is written.

    Raises:
        CheckpointError: ranks describe a tensor differently, or its intervals overlap or do not cover it.
    """
    ranks_of: dict[str, dict[PlannedInterval, list[int]]] = {}
    for rank, plan in enumerate(plans):
        for interval in plan:
            ranks_of.setdefault(interval.key, {}).setdefault(interval, []).append(rank)
    writes: list[list[PlannedInterval]] = [[] for _ in plans]
    load = [0] * len(plans)
    for key, intervals in ranks_of.items():
        _check(key, intervals)
        for interval, ranks in intervals.items():
            for node in {nodes[rank] for rank in ranks}:
                there = [rank for rank in ranks if nodes[rank] == node]
                writer = there[0] if key in firsts else min(there, key=load.__getitem__)
                writes[writer].append(interval)
                load[writer] += interval.size
    return writes


def _check(key: str, intervals: dict[PlannedInterval, list[int]]) -> None:
    first = next(iter(intervals))
    for interval, ranks in intervals.items():
        if interval[2:5] != first[2:5]:
            raise CheckpointError(
                f"{key!r} is {_described(first)} on {ranks_in_words(intervals[first])}, but {_described(interval)} on "
                f"{ranks_in_words(ranks)}; every rank must save the same tensors"
            )
    end = 0
    for interval in sorted(intervals, key=lambda interval: (interval.start, interval.stop)):
        if interval.start != end:
            problem = "held twice, in different intervals" if interval.start < end else "held by no rank"
            low, high = sorted((interval.start, end))
            raise CheckpointError(f"{key!r} {first.shape}: elements [{low}, {high}) are {problem}")
        end = interval.stop
    if end != prod(first.shape):
        raise CheckpointError(f"{key!r} {first.shape}: elements [{end}, {prod(first.shape)}) are held by no rank")


def _described(interval: PlannedInterval) -> str:
    stride = "" if interval.stride is None else f" with strides {interval.stride}"
    return f"{interval.dtype} {interval.shape}{stride}"
