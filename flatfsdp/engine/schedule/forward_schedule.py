"""What a forward gathers, frees and leaves unsharded next: events in, actions out; pure.

[Note: forward order] All ranks enter the same units in one order, which is compared as they gather. When a unit is
entered, the owners of its tied parameters are gathered, then the unit with small ones that followed it in the last
complete forward, then what it gathers ahead: the units that it lists, or the one that followed. The last complete
forward is the same on all ranks, and so are these groups.

When the part of a unit is over it is freed, unless it is to stay for its backward, more of its entries are to run, or a
unit that uses its parameters is in its forward: then it is freed when that one's part is over.
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
    """Units that another one gathers ahead; false where it lists none."""

    def __bool__(self) -> bool: ...

    def units(self) -> Iterable[U_co]:
        """Those that are still there, in order."""


@dataclass(frozen=True, slots=True)
class ForwardFacts(Generic[U]):
    """What is read of a unit in a forward.

    Attributes:
        owners: units of which it uses parameters; users: those that use parameters of it; has_users: whether there are.
        runs: whether it is in its forward. is_requested: whether a user has unsharded it.
        is_unsharded: whether it is gathered, or on its way.
        gathers_next: whether it gathers the unit ahead that followed it; listed: what it gathers ahead instead.
        coalesced: it with those of the units that follow it that share its gather.
        reshards: whether it is freed between forward and backward.
        stays: whether no end of its backward can be observed, so that it is left unsharded until all is over.
        retains: whether something of it can be kept between forward and backward, which gathers from that.
        lacks: whether more of its entries are to run than these, given by id.
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
    """The decisions of one model's forwards. Who carries them out derives from it.

    Attributes:
        order: what followed what in the last complete forward.
        lacking: units of which more entries are to run: those that ran, by id. [Note: entries]
    """

    def __init__(self, facts: ForwardFacts[U]) -> None:
        self._facts = facts
        self.order: ForwardOrder[U] = ForwardOrder()
        self.lacking: dict[U, set[int]] = {}

    # -- actions -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def gather(self, units: Sequence[U], *, ahead: bool) -> None:
        """Issue the gather of whatever is sharded of a group, maybe `ahead` of its use."""

    @abstractmethod
    def free(self, unit: U, *, retains: bool) -> None:
        """Free the unsharded parameters; `retains`: but for what is kept for the backward."""

    @abstractmethod
    def leave_unsharded(self, unit: U) -> None:
        """Leave the parameters unsharded for the backward."""

    # -- events ------------------------------------------------------------------------------------------------------

    def enters(self, unit: U, *, in_order: bool = True) -> None:
        """`unit` is about to run; not `in_order`: again, inside of a backward."""
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
        """One of the several entries of `unit`, by id, has run: it is kept for the others of this forward."""
        ran = self.lacking.setdefault(unit, set())
        ran.add(entry)
        if not self._facts.lacks(unit, ran):
            del self.lacking[unit]

    def finished(self, record: ForwardRecord[U], unit: U, *, training: bool, reached: bool, keep: bool = False) -> None:
        """The part of `unit` in the forward is over; it is to `keep` its parameters, or a gradient can come to it
        (`reached`)."""
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
        """The forward is complete: units of which not all entries have run are freed, but the `outermost` one that ran,
        whose entry may be called again."""
        for unit in self.lacking:
            if unit is not outermost and self._facts.reshards(unit) and not self._facts.stays(unit):
                self.free(unit, retains=bool(self._facts.retains(unit)) and record.awaits(unit))
        self.lacking.clear()

    def _in_use(self, unit: U) -> bool:
        """Whether a unit that uses parameters of `unit` is in its forward."""
        return any(map(self._facts.runs, self._facts.users(unit)))
