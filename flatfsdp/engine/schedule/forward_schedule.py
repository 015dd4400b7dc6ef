"""The forwards of one model: what each gathers, frees and leaves unsharded, and the record, by unit and time, of those
that one backward may cover; pure.

The driver reports events, and `runtime/executor.py` executes what they return, in order ([Note: actions]).

[Note: forward order] All ranks enter the same units in one order, which is compared when they gather. When a unit is
entered, the owners of its tied parameters are gathered, then the unit together with small units that followed it in the
last complete forward, then its prefetch targets: the units that it lists, or the one that followed. The last complete
forward is the same on all ranks, and so are these groups.

At the end of its forward a unit is freed, unless it is to stay unsharded for its backward, more of its entries are to
run, or a unit that uses its parameters is in its forward: then it is freed at the end of that one.

[Note: backward order] Ranks may run different autograd graphs (a parameter unused here, a branch there), so the times
at which a unit's backward begins or its last gradient arrives give no common order. The order of the forward does.
Hence: *gathers* of a backward are issued in the reverse of the order in which units finished their forward, and
*reductions* in the reverse of the order in which units began it; each on a communicator of its own, so the two
sequences need no common interleaving. A unit that is ready before its turn waits; at the end of the backward the
remaining ones are flushed in order. In a model that is nested like a tree, units get ready in turn, and none waits.

Ranks wait for each other's gathers and reductions. No rank may wait for one that another rank has not issued while
that waits for this rank. So both are on one clock, which runs backwards from the end of the forward: the gather of a
unit is due when it last *ended*, its reduction when it first *began*. A rank that waits for a collective has issued all
that are due before it; so of all awaited collectives, the first to be due has been issued by every rank. Autograd makes
this possible: it takes the newest node first, so when it reaches a unit's end, it has finished all units that began
later, and their missing gradients will never arrive. For the same reason a unit that was called more than once stays
unsharded until its first call is over: a rank that got its gradients from the last calls, or has no graph of the
others, would otherwise gather it again, alone.

A non-reentrant checkpoint recomputes all units in its *segment* when a backward reaches the first of them, and gathers
them for that: their gathers are due when the last of them ended, also on ranks that do not reach that one.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from .actions import Action

U = TypeVar("U", bound=Hashable)
# "graph": it began with one; "shared": a unit that began with one uses its parameters; "again": gradients may also
# come from another run of it; "none": it began without one, and only an enclosing checkpoint is known to make it.
How = Literal["graph", "shared", "again", "none"]


class ForwardPass:
    """One forward of a model; it lives as long as the graph that was made in it."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False)
class CheckpointRegion:
    """The part of a forward that one checkpoint recomputes: from the start of its first unit to the end of its last.

    Attributes:
        around: the non-reentrant checkpoint inside of which this one is recomputed.
        checkpoint: an object that identifies a reentrant checkpoint, the outermost; units inside have no graph yet.
    """

    began: int
    ended: int = 0
    around: CheckpointRegion | None = None
    checkpoint: object | None = None

    def outwards(self) -> Iterator[CheckpointRegion]:
        """This region and the enclosing ones."""
        each: CheckpointRegion | None = self
        while each is not None:
            yield each
            each = each.around

    @property
    def outermost(self) -> CheckpointRegion:
        """The outermost enclosing region; itself if there is none."""
        return self if self.around is None else self.around.outermost


@dataclass(eq=False)
class PassLog(Generic[U]):
    """The log of one pass, in order.

    Attributes:
        runs: (unit, tick of its beginning, how it began, the innermost non-reentrant checkpoint around it). Such
            checkpoints recompute units on this rank or on others, depending on the tensors that they saved there.
        ended: the tick at which each unit last finished with an output through which a gradient can reach it.
    """

    runs: list[tuple[U, int, How, CheckpointRegion | None]] = field(default_factory=list)
    ended: dict[U, int] = field(default_factory=dict)


def _no_segments() -> Sequence[object]:
    return ()


class ForwardRecord(Generic[U]):
    """The forward passes that one backward may cover.

    Attributes:
        running: the pass that runs, if one does.
        continues: whether there were passes before the last, and no backward over them.
        recomputed: (unit, tick, region) of units that began in a reentrant checkpoint, with the region that is
            recomputed.
        begun_again: units that began more than once, at least the last time without a graph.
        entered_at: the tick at which a unit was last entered.
        consumed: whether a backward has begun, and no unit has finished since: the next forward opens a new record.
    """

    def __init__(self) -> None:
        self._entered: dict[U, None] = {}  # in the order of first entry
        self._begun: dict[U, int] = {}  # the tick of the first beginning, also of units that began without a graph
        self._anchored: dict[U, None] = {}  # in the order of last anchoring
        self._running: set[U] = set()  # anchored units whose forward runs again: no backward inside of it reaches them
        self.begun_again: set[U] = set()
        self.recomputed: list[tuple[U, int, CheckpointRegion]] = []
        self._reentrant = CheckpointRegion(0)  # the reentrant checkpoint in which a unit ran last
        self._segments: weakref.WeakKeyDictionary[object, CheckpointRegion] = weakref.WeakKeyDictionary()
        self._inside: dict[U, CheckpointRegion] = {}  # the innermost region in which each unit was last entered
        self._entered_inside: CheckpointRegion | None = None  # that of the last entered unit
        self._passes: weakref.WeakKeyDictionary[ForwardPass, PassLog[U]] = weakref.WeakKeyDictionary()
        self._now: PassLog[U] = PassLog()  # of the pass that ran last
        self._clock = self.entered_at = 0
        self.running: ForwardPass | None = None
        self.consumed = self.continues = False

    def begin(self) -> None:
        """Begin a pass."""
        self.running = ForwardPass()
        self.continues = bool(self._entered) and not self.consumed
        self._running.clear()
        self._now = self._passes[self.running] = PassLog()

    def end(self) -> None:
        """End the pass."""
        self.running = None

    # -- units begin -------------------------------------------------------------------------------------------------

    def enter(
        self, unit: U, *, segment: object | None = None, segments: Callable[[], Sequence[object]] = _no_segments
    ) -> None:
        """Record that `unit` began its forward, in a `segment` if there is one. `segments` returns that and the
        enclosing ones, the innermost first; if it does not contain `segment`, that is not a checkpoint."""
        now = self.entered_at = self._clock = self._clock + 1
        inside = self._entered_inside = self._segment(segment, segments) if segment is not None else None
        if inside is not None or self._inside:
            self._enter_region(unit, inside)
        if unit in self._anchored:
            self._running.add(unit)
        self._begun.setdefault(unit, now)
        self._entered.setdefault(unit)
        self._now.runs.append((unit, now, "graph", inside))

    def _segment(self, segment: object, segments: Callable[[], Sequence[object]]) -> CheckpointRegion | None:
        inside = self._segments.get(segment)
        if inside is None:
            for each in reversed(segments()):
                found = self._segments.get(each)
                if found is None:
                    found = self._segments[each] = CheckpointRegion(self._clock, around=inside)
                inside = found
        return inside

    def _enter_region(self, unit: U, inside: CheckpointRegion | None) -> None:
        if inside is not None:
            self._inside[unit] = inside
        else:
            self._inside.pop(unit, None)

    def enter_without_graph(
        self,
        unit: U,
        *,
        checkpoint: object | None = None,
        segment: object | None = None,
        segments: Callable[[], Sequence[object]] = _no_segments,
    ) -> None:
        """Record that `unit` began its forward without a graph. A recomputation may still make one, and does so inside
        of a reentrant checkpoint, which `checkpoint` identifies. For the other arguments see `enter`."""
        if unit in self._begun:
            self.begun_again.add(unit)
        now = self._tick(unit)
        inside = self._segment(segment, segments) if segment is not None else None
        if checkpoint is not None:
            if checkpoint != self._reentrant.checkpoint:
                self._reentrant = CheckpointRegion(now, around=inside, checkpoint=checkpoint)
            inside = self._reentrant
            self.recomputed.append((unit, now, inside))
        elif inside is not None:
            self._now.runs.append((unit, now, "none", inside))
        self._entered_inside = inside
        self._enter_region(unit, inside)

    def enter_sharing(self, owning_unit: U) -> None:
        """Record that the last entered unit uses parameters of `owning_unit`, which takes part in its backward."""
        self._entered.setdefault(owning_unit)
        self._now.runs.append((owning_unit, self._tick(owning_unit), "shared", self._entered_inside))

    def enter_sharing_without_graph(self, owning_unit: U) -> None:
        """Record that the last entered unit, which has no graph, uses parameters of `owning_unit`."""
        now, inside = self._tick(owning_unit), self._entered_inside
        if inside is not None:
            self._now.runs.append((owning_unit, now, "none", inside))

    def repeat(self, unit: U) -> None:
        """Record that `unit` runs again, in addition to units that a backward gathers with it."""
        self._now.runs.append((unit, self._clock, "again", None))

    def add(self, unit: U) -> None:
        """Add `unit`, which did not run, but whose parameters were used at an unknown time."""
        self._tick(unit)
        self._entered.setdefault(unit)
        self._anchored.pop(unit, None)
        self._anchored[unit] = None

    def _tick(self, unit: U) -> int:
        self._clock += 1
        self._begun.setdefault(unit, self._clock)
        return self._clock

    # -- and finish --------------------------------------------------------------------------------------------------

    def leave(self, unit: U, *, itself: bool = True) -> None:
        """Record that `unit` finished its forward with an output through which a gradient can reach it. Not `itself`: a
        unit that used its parameters did, which does not end the region in which `unit` ran."""
        self._anchored.pop(unit, None)
        self._anchored[unit] = None
        self._running.discard(unit)
        self.consumed = False  # if a backward inside of this forward has begun, another one will follow
        self._clock += 1
        self._now.ended[unit] = self._clock
        if self._inside and itself:
            self._leave_regions(unit)

    def leave_without_graph(self, unit: U) -> None:
        """Record that `unit` finished its forward, and that no gradient can reach it unless it is recomputed."""
        self._clock += 1
        self._running.discard(unit)
        if self._inside:
            self._leave_regions(unit)

    def _leave_regions(self, unit: U) -> None:
        for each in self._inside[unit].outwards() if unit in self._inside else ():
            each.ended = self._clock

    # -- properties that a backward reads -----------------------------------------------------------------------------

    @property
    def passes(self) -> Sequence[PassLog[U]]:
        """The passes that a backward may reach, because their graphs live, in order."""
        return tuple(self._passes.values())

    @property
    def may_recompute(self) -> bool:
        """Whether units ran without a graph, so that recomputations may still make one."""
        return len(self._begun) > len(self._entered)

    def positions(self, units: Iterable[U]) -> list[int]:
        """The ticks at which `units` first began; they count as having graphs from now on (after a recomputation)."""
        found = []
        for unit in units:
            self._entered.setdefault(unit)
            found.append(self._begun[unit] if unit in self._begun else self._tick(unit))
        return found

    def awaits(self, unit: U) -> bool:
        """Whether a gradient can reach `unit` in a backward that has not begun."""
        return unit in self._anchored and not self.consumed

    @property
    def entered(self) -> tuple[U, ...]:
        """Units in the order in which they began."""
        return tuple(self._entered)

    @property
    def begun(self) -> tuple[U, ...]:
        """Units in the order in which they began, including those that have no graph, or not yet."""
        return tuple(self._begun)

    @property
    def anchored(self) -> tuple[U, ...]:
        """Units that await a gradient and do not run, in the order in which they (last) finished."""
        return (
            tuple(unit for unit in self._anchored if unit not in self._running) if self._running else (*self._anchored,)
        )

    @property
    def empty(self) -> bool:
        """Whether nothing was anchored: no backward can follow."""
        return not self._anchored


@dataclass(frozen=True, slots=True)
class ForwardFacts(Generic[U]):
    """Functions that return facts about a unit in a forward.

    Attributes:
        owners: units whose parameters it uses; users: units that use its parameters; has_users: whether there are any.
        runs: whether it is in its forward. is_requested: whether the user has unsharded it explicitly.
        joins: whether it is small, and gathered with small units that follow it.
        gathers_next: whether it prefetches the unit that followed it; lists: whether it lists units to prefetch
            instead; listed: those of them that still exist, in order.
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
    lists: Callable[[U], object]
    listed: Callable[[U], Iterable[U]]
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
        if facts.lists(unit):
            actions += [("ahead", (each,)) for each in facts.listed(unit)]
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
        """Called at the end of the forward of `unit`: free it and its owners, or leave them unsharded.
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
