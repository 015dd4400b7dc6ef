"""Numbers from rounds: medians, spreads, ratios within a round, and the distance of two runs' losses."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

TOLERANCE = 1e-4  # relative, of losses: engines sum gradients in different orders


class Spread(NamedTuple):
    """The spread of a figure over rounds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(median(values), min(values), max(values))


def paired_ratio(values: Sequence[float], base: Sequence[float]) -> Spread:
    """Ratios to ``base`` round by round: disturbances of a whole round cancel."""
    return Spread.of([value / reference for value, reference in zip(values, base, strict=True)])


def distance(losses: Sequence[float], truth: Sequence[float]) -> float:
    """The largest relative difference of two trajectories; infinite where one has a NaN or their lengths differ."""
    if len(losses) != len(truth):
        return float("inf")
    pairs = list(zip(losses, truth, strict=True))
    if any(a != a or b != b for a, b in pairs):
        return float("inf")
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=0.0)


def joined(sizes: Sequence[int], least: int) -> list[int]:
    """Neighbors in ``sizes`` summed until each sum except the last is at least ``least``."""
    sums = [0]
    for size in sizes:
        if sums[-1] >= least:
            sums.append(0)
        sums[-1] += size
    return sums
