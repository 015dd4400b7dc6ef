"""Which small units share their collectives.

[Note: joining] A collective costs the host about the same whatever it moves, so small units that follow each other in
the agreed order are gathered, and reduced, as one. How small is a number of bytes, which bounds what a group of them
has together, too: the staging buffer through which it travels, and the memory that is taken ahead of its use. Order and
sizes are what all ranks agree on, so they find the same groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

U = TypeVar("U")


def coalesce(
    sequence: Iterable[U], key: Callable[[U], tuple[int, object] | None], *, most: int
) -> Iterator[tuple[U, ...]]:
    """Cut `sequence` into groups of units that share their collectives; nothing is read beyond a group's end but one.

    Args:
        sequence: units in the order of their collectives.
        key: the bytes of a unit and what its group must have in common with it; None for one that stays alone.
        most: the bytes of a group.
    """
    group: list[U] = []
    common: object = None
    room = 0
    for unit in sequence:
        size, mine = key(unit) or (most, object())
        if group and (size > room or mine != common):
            yield tuple(group)
            group = []
        if not group:
            common, room = mine, most
        group.append(unit)
        room -= size
    if group:
        yield tuple(group)
