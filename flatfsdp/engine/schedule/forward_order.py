"""The order of units in a forward, from which the next one gathers ahead; pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)


class ForwardOrder(Generic[U]):
    """The order of units in the running forward, and in the last complete one, from which this one prefetches.

    A unit that is entered several times has a follower for each.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[U, int], U] = {}  # (unit, which visit of it) -> what followed
        self._learned: dict[tuple[U, int], U] = {}
        self._visits: dict[U, int] = {}
        self._now: tuple[U, int] | None = None

    def begin(self) -> None:
        """A forward begins."""
        self._learned = {}
        self._visits = {}
        self._now = None

    def enter(self, unit: U) -> bool:
        """`unit` is entered; True if it is the first one."""
        first = self._now is None
        if self._now is not None:
            self._learned[self._now] = unit
        visit = self._visits[unit] = self._visits.get(unit, 0) + 1
        self._now = unit, visit
        return first

    def end(self) -> None:
        """The forward is complete."""
        self._known = self._learned

    def upcoming(self) -> Iterator[U]:
        """What followed, in the last complete forward, that visit of the unit that was entered last: one unit after the
        other, until one comes again."""
        now = self._now
        visits = dict([now] if now is not None else [])
        while now is not None and (unit := self._known.get(now)) is not None and unit not in visits:
            visits[unit] = self._visits.get(unit, 0) + 1
            yield unit
            now = unit, visits[unit]
