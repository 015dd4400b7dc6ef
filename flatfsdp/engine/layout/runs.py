"""Runs of parameters that are contiguous in a shard, so that an elementwise operation can treat them as one tensor."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .layout import Span


@dataclass(frozen=True, slots=True)
class ParamInShard:
    """The place of a parameter in a shard.

    Attributes:
        span: the span in the shard; empty for a parameter without elements in the shard.
        kind: parameters of equal kind may be in one run; None: with no other parameter.
    """

    span: Span
    kind: Hashable


def find_runs(places: Sequence[ParamInShard], *, padding: int) -> list[list[int]]:
    """The indices of the places in each run, a maximal sequence of one kind with only padding between; no empty places.

    Args:
        places: the places in the order of their spans.
        padding: the most elements between two places of a run.

    Example:
        >>> places = [ParamInShard(Span(0, 6), "a"), ParamInShard(Span(8, 11), "a"), ParamInShard(Span(12, 14), "b")]
        >>> find_runs(places, padding=3)
        [[0, 1], [2]]
    """
    found: list[list[int]] = []
    last: ParamInShard | None = None
    for index, place in enumerate(places):
        if place.span.is_empty:
            continue
        alike = last is not None and place.kind is not None and place.kind == last.kind
        if last is not None and alike and place.span.start - last.span.stop <= padding:
            found[-1].append(index)
        else:
            found.append([index])
        last = place
    return found
