"""Parameters that lie together in a shard, as runs: what an elementwise operation can treat as one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .layout import Span


@dataclass(frozen=True, slots=True)
class ParamInShard:
    """Where a parameter lies in a shard.

    Attributes:
        span: of the shard; empty for a parameter of which the shard holds nothing.
        kind: parameters are taken together where this is equal; None: with no other.
    """

    span: Span
    kind: Hashable


def find_runs(places: Sequence[ParamInShard], *, padding: int) -> list[list[int]]:
    """The places by run: maximal sequences of one kind that only padding divides. Empty places are in none.

    Args:
        places: in the order in which they lie.
        padding: how many elements at most may lie between two of a run.

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
