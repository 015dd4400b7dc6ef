"""The schedule of a forward, which decides what to gather, free and leave unsharded: events in, actions out; pure.

[Note: forward order] All ranks enter the same units in one order, which is compared when they gather. When a unit is
entered, the owners of its tied parameters are gathered, then the unit together with small units that followed it in the
last complete forward, then its prefetch targets: the units that it lists, or the one that followed. The last complete
forward is the same on all ranks, and so are these groups.

At the end of its part a unit is freed, unless it is to stay unsharded for its backward, more of its entries are to run,
or a unit that uses its parameters is in its forward: then it is freed at the end of that one's part.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from .forward_record import ForwardOrder, ForwardRecord

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
        is_unsharded: whether it is gathered, or its gather is in flight.
        gathers_next: whether it prefetches the unit that followed it; listed: the units to prefetch instead.
        coalesced: the unit with those of the following units that share its gather.
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
    is_unsharded: Callable[[U], bool]
    gathers_next: Callable[[U], bool]
    listed: Callable[[U], Listed[U]]
    coalesced: Callable[[U, Iterable[U]], Sequence[U]]
    reshards: Callable[[U], bool]
    stays: Callable[[U], bool]
    retains: Callable[[U], object]
    lacks: Callable[[U, set[int]], bool]


class ForwardSchedule(ABC, Generic[U]):
    """The decisions in the forwards of one model. A subclass implements the actions.

    Attributes:
        order: the order of units in the last complete forward.
        lacking: for units with entries that have yet to run, the ids of those that ran. [Note: entries]
    """

    def __init__(self, facts: ForwardFacts[U]) -> None:
        self._facts = facts
        self.order: ForwardOrder[U] = ForwardOrder()
        self.lacking: dict[U, set[int]] = {}

    # -- actions -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def gather(self, units: Sequence[U], *, ahead: bool) -> None:
        """Issue the gather of those units of a group that are sharded, possibly `ahead` of their use."""

    @abstractmethod
    def free(self, unit: U, *, retains: bool) -> None:
        """Free the unsharded parameters; `retains`: except for the part that is kept for the backward."""

    @abstractmethod
    def leave_unsharded(self, unit: U) -> None:
        """Leave the parameters unsharded for the backward."""

    # -- events ------------------------------------------------------------------------------------------------------

    def enters(self, unit: U, *, in_order: bool = True) -> None:
        """Gather before `unit` runs; not `in_order`: it runs again, inside of a backward."""
        facts, gather = self._facts, self.gather
        for owner in facts.owners(unit):
            if not facts.is_requested(owner):
                gather((owner,), ahead=False)
        if not facts.is_unsharded(unit):
            gather(facts.coalesced(unit, self.order.upcoming()), ahead=False)
        if not in_order:
            return
        if listed := facts.listed(unit):
            for each in listed.units():
                if not facts.is_unsharded(each):
                    gather(facts.coalesced(each, ()), ahead=True)
        elif facts.gathers_next(unit):
            following = self.order.upcoming()
            for each in itertools.islice(following, 1):
                if not facts.is_unsharded(each):
                    gather(facts.coalesced(each, following), ahead=True)

    def entry_ran(self, unit: U, entry: int) -> None:
        """Record that one of the several entries of `unit` has run, by id: the unit is kept for those left to run."""
        ran = self.lacking.setdefault(unit, set())
        ran.add(entry)
        if not self._facts.lacks(unit, ran):
            del self.lacking[unit]

    def finished(self, record: ForwardRecord[U], unit: U, *, training: bool, reached: bool, keep: bool = False) -> None:
        """Free the unit and its owners, or leave them unsharded, at the end of the part of `unit` in the forward.
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
        if keep or in_use or unit in self.lacking or not facts.reshards(unit):
            self.leave_unsharded(unit)
        else:
            self.free(unit, retains=bool(facts.retains(unit)) and record.awaits(unit))
        for owner in owners:
            if facts.runs(owner) or facts.is_requested(owner) or facts.stays(owner) or self._in_use(owner):
                continue
            if facts.reshards(owner):
                awaited = bool(facts.retains(owner)) and (record.awaits(owner) or record.awaits(unit))
                self.free(owner, retains=awaited)
            else:
                self.leave_unsharded(owner)

    def ended_lacking(self, record: ForwardRecord[U], outermost: U) -> None:
        """At the end of a forward, free units of which not all entries have run, except the `outermost` one, whose
        entry may be called again."""
        for unit in self.lacking:
            if unit is not outermost and self._facts.reshards(unit) and not self._facts.stays(unit):
                self.free(unit, retains=bool(self._facts.retains(unit)) and record.awaits(unit))
        self.lacking.clear()

    def _in_use(self, unit: U) -> bool:
        """Whether a unit that uses parameters of `unit` is in its forward."""
        return any(map(self._facts.runs, self._facts.users(unit)))
