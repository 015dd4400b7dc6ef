"""What ranks did to their gradients between a backward and an optimizer's step, judged by some elements; pure.

[Note: local norms] `torch.nn.utils.clip_grad_norm_` takes the norm of what one process holds. Of shards that is another
norm on each rank, and each multiplies its gradients by another factor. What it leaves behind: on every rank elements of
several sizes have become smaller by one and the same factor; these factors differ, though the ranks hold pieces of one
parameter, or though what is left has the same norm, the one that was asked for. Both are needed: parameters may be
scaled by factors of their own on purpose, and then ranks that hold different ones differ, too. Factors that are powers
of two apart come from scaling losses.

What fits nothing of it is a program's own affair: clipping by value, noise, gradients that were set to zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

LEAST = 1e-4  # how far factors that are one may be apart


class Scaling(NamedTuple):
    """One rank multiplied its gradients by one `factor`.

    Attributes:
        norm: of its gradients after that.
        numbers: of the parameters that it was seen at.
    """

    factor: float
    norm: float
    numbers: frozenset[int]


def tolerance(eps: float) -> float:
    """How far factors may be apart, relative to them, by the rounding of gradients with this machine epsilon."""
    return max(LEAST, 2 * eps)


def one_factor(pairs: Iterable[tuple[float, float]], *, within: float, tiny: float) -> float | None:
    """By what elements became what they are, if it is one factor, not more than 1 and not 0; None otherwise.

    `pairs`: an element before and after; elements below `tiny` say nothing, and such of one size nothing about factors.
    """
    factors = []
    sizes = []
    for before, after in pairs:
        if not math.isfinite(before) or not math.isfinite(after) or (before == 0) != (after == 0):
            return None
        if min(abs(before), abs(after)) >= tiny:
            factors.append(after / before)
            sizes.append(abs(before))
    if not sizes or max(sizes) < min(sizes) * (1 + 10 * within):
        return None
    low, high = min(factors), max(factors)
    is_one = low > 0 and high <= 1 + within and high - low <= within * high
    return (low + high) / 2 if is_one else None


def are_apart(one: Scaling, other: Scaling, *, within: float) -> bool:
    """Whether these ranks each took a norm of its own. [Note: local norms]"""
    ratio = one.factor / other.factor
    if abs(ratio / 2 ** round(math.log2(ratio)) - 1) <= 2 * within:
        return False
    both_clipped = max(one.factor, other.factor) < 1 - within
    same_norm = both_clipped and math.isclose(one.norm, other.norm, rel_tol=2 * within)
    return same_norm or not one.numbers.isdisjoint(other.numbers)
