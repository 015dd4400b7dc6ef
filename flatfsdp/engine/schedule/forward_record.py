"""The record of the forwards that one backward may cover, by unit and time, and the order of the last forward; pure.

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

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

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

    def position(self, unit: U) -> int:
        """The tick at which `unit` first began; it counts as having a graph from now on (after a recomputation)."""
        self._entered.setdefault(unit)
        return self._begun[unit] if unit in self._begun else self._tick(unit)

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
