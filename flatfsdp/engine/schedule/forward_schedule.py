"""The schedule of a forward, which decides what to gather, free and leave unsharded: events in, actions out; pure.

The driver reports events and executes the actions that they return, in order.

[Note: forward order] All ranks enter the same units in one order, which is compared when they gather. When a unit is
entered, the owners of its tied parameters are gathered, then the unit together with small units that followed it in the
last complete forward, then its prefetch targets: the units that it lists, or the one that followed. The last complete
forward is the same on all ranks, and so are these groups.

At the end of its part a unit is freed, unless it is to stay unsharded for its backward, more of its entries are to run,
or a unit that uses its parameters is in its forward: then it is freed at the end of that one's part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from .actions import Action
from .forward_record import ForwardRecord

U = TypeVar("U", bound=Hashable)
U_co = TypeVar("U_co", bound=Hashable, covariant=True)


class Listed(Protocol[U_co]):
    """The units that another one lists as prefetch targets; false if it lists none."""

    def __bool__(self) -> bool: ...

    def units(self) -> Iterable[U_co]:
        """The units that still exist, in order."""


@dataclass(frozen=True, slots=True)
class ForwardFacts(Generic[U]):
    """Functions that return facts about a unit in a forward.

    Attributes:
        owners: units whose parameters it uses; users: units that use its parameters; has_users: whether there are any.
        runs: whether it is in its forward. is_requested: whether the user has unsharded it explicitly.
        joins: whether it is small, and gathered with small units that follow it.
        gathers_next: whether it prefetches the unit that followed it; listed: the units to prefetch instead.
        coalesced: the unit with those of the following units that share its gather; alone if it is unsharded.
        reshards: whether it is freed between forward and backward.
        stays: whether the end of its backward cannot be observed, so that it stays unsharded until the iteration ends.
        retains: whether a part of it can be kept between forward and backward, from which the backward gathers.
        lacks: whether entries other than these, given by id, have yet to run.
    """

    owners: Callable[[U], Sequence[U]]
    users: Callable[[U], Iterator[U]]
    has_users: Callable[[U], object]
    runs: Callable[[U], bool]
    is_requested: Callable[[U], bool]
    joins: Callable[[U], bool]
    gathers_next: Callable[[U], bool]
    listed: Callable[[U], Listed[U]]
    coalesced: Callable[[U, Iterable[U]], Sequence[U]]
    reshards: Callable[[U], bool]
    stays: Callable[[U], bool]
    retains: Callable[[U], object]
    lacks: Callable[[U, set[int]], bool]


class ForwardOrder(Generic[U]):
    """The order of units in the running forward, and in the last complete one, by which the running one prefetches.

    A unit that is entered several times has a follower for each visit.

    Attributes:
        now: the unit that was entered last, and the number of its visit; None before the first.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[U, int], U] = {}  # (unit, number of the visit) -> the unit that followed
        self._learned: dict[tuple[U, int], U] = {}
        self._visits: dict[U, int] = {}
        self.now: tuple[U, int] | None = None

    def begin(self) -> None:
        """Begin a forward."""
        self._learned = {}
        self._visits = {}
        self.now = None

    def enter(self, unit: U) -> None:
        """Record that `unit` is entered."""
        if self.now is not None:
            self._learned[self.now] = unit
        visit = self._visits[unit] = self._visits.get(unit, 0) + 1
        self.now = unit, visit

    def end(self) -> None:
        """Complete the forward."""
        self._known = self._learned

    def upcoming(self) -> Iterator[U]:
        """The units that followed, in the last complete forward, the current visit of the last entered unit, in order,
        up to the first repetition."""
        now = self.now
        visits = dict([now] if now is not None else [])
        while now is not None and (unit := self._known.get(now)) is not None and unit not in visits:
            visits[unit] = self._visits.get(unit, 0) + 1
            yield unit
            now = unit, visits[unit]


class ForwardSchedule(Generic[U]):
    """The decisions in the forwards of one model.

    Attributes:
        order: the order of units in the last complete forward.
        lacking: for units with entries that have yet to run, the ids of those that ran. [Note: entries]
    """

    def __init__(self, facts: ForwardFacts[U]) -> None:
        self._facts = facts
        self.order: ForwardOrder[U] = ForwardOrder()
        self.lacking: dict[U, set[int]] = {}

    def enters(self, unit: U, *, in_order: bool = True) -> list[Action[U]]:
        """Called before `unit` runs; not `in_order`: it runs again, inside of a backward."""
        facts = self._facts
        if in_order:
            self.order.enter(unit)
        actions: list[Action[U]] = []
        for each in facts.owners(unit):
            if not facts.is_requested(each):
                actions.append(("gather", (each,)))
        joined = facts.coalesced(unit, self.order.upcoming()) if facts.joins(unit) else (unit,)
        actions.append(("gather", joined))
        if not in_order:
            return actions
        if listed := facts.listed(unit):
            actions += [("ahead", (each,)) for each in listed.units()]
        elif facts.gathers_next(unit):
            following = self.order.upcoming()
            for each in itertools.islice(following, 1):
                if each not in joined:
                    actions.append(("ahead", facts.coalesced(each, following)))
        return actions

    def entry_ran(self, unit: U, entry: int) -> None:
        """Record that one of the several entries of `unit` has run, by id: the unit is kept for those left to run."""
        ran = self.lacking.setdefault(unit, set())
        ran.add(entry)
        if not self._facts.lacks(unit, ran):
            del self.lacking[unit]

    def finished(
        self, record: ForwardRecord[U], unit: U, *, training: bool, reached: bool, keep: bool = False
    ) -> list[Action[U]]:
        """Called at the end of the part of `unit` in the forward: free it and its owners, or leave them unsharded.
        `keep`: leave it unsharded in any case. `reached`: a gradient can reach it."""
        facts = self._facts
        owners = facts.owners(unit)
        if reached:
            record.leave(unit)
            for owner in owners:
                record.leave(owner, itself=False)
        elif training:
            record.leave_without_graph(unit)
        in_use = facts.has_users(unit) and self._in_use(unit)
        stays = keep or in_use or unit in self.lacking or not facts.reshards(unit)
        actions = [("leave", (unit,)) if stays else self._free(record, unit, unit)]
        for owner in owners:
            if facts.runs(owner) or facts.is_requested(owner) or facts.stays(owner) or self._in_use(owner):
                continue
            actions.append(self._free(record, owner, unit) if facts.reshards(owner) else ("leave", (owner,)))
        return actions

    def ended(self, record: ForwardRecord[U], outermost: U) -> list[Action[U]]:
        """At the end of a forward, free units of which not all entries have run, except the `outermost` one, whose
        entry may be called again."""
        facts = self._facts
        freed = [u for u in self.lacking if u is not outermost and facts.reshards(u) and not facts.stays(u)]
        self.lacking.clear()
        return [self._free(record, unit, unit) for unit in freed]

    def _free(self, record: ForwardRecord[U], unit: U, user: U) -> Action[U]:
        awaited = self._facts.retains(unit) and (record.awaits(unit) or record.awaits(user))
        return ("retain" if awaited else "free", (unit,))

    def _in_use(self, unit: U) -> bool:
        """Whether a unit that uses parameters of `unit` is in its forward."""
        return any(map(self._facts.runs, self._facts.users(unit)))
