"""The clock of one backward: when, counted down from the end of the forward, units are due; pure. [Note: one clock]

[Note: lifetimes] A *lifetime* is the part of the clock in which a unit is unsharded. It is gathered once in it, when
the first of its uses is due, and freed when the clock has passed the last: the begin of its first call, or of what a
checkpoint may run again with that. Ranks reach different uses, so a rank frees a unit earlier only where it cannot
come to it again. A unit that has a graph, or is inside of a checkpoint without reentrance, has one lifetime around all
of its uses, and its gather a turn. One that reentrant checkpoints alone will make graphs of has a lifetime for each of
these: no rank can leave such a checkpoint out, so all ranks gather when it runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Generic, TypeVar

from .forward_record import CheckpointRegion, ForwardRecord

U = TypeVar("U", bound=Hashable)
NEVER = math.inf  # when a unit ended that did not run in a pass, and when it began


@dataclass(eq=False)
class Lifetime(Generic[U]):
    """From when on `unit` is unsharded, and until when.

    Attributes:
        due: when it is gathered; over: when it is freed at last.
        region: the reentrant checkpoint that it is gathered in; None: the gather has a turn.
        shared: whether the unit has several uses, of which a rank does not know which is its last in there.
        reruns: how often checkpoints without reentrance run it again beside others.
        makes_graph: whether its only use has no graph yet.
        behind: how many groups have their turn before it, where it has none.
    """

    unit: U
    due: int
    over: int
    region: CheckpointRegion | None = None
    shared: bool = False
    reruns: int = 0
    makes_graph: bool = False
    behind: int = 0


class BackwardClock(Generic[U]):
    """What a record has of a backward over it, and how far this has come.

    Attributes:
        sequence: the units of the plan, in the order in which they are reached, if they are; planned: the same.
        began: when units began that the backward may reach, in that order.
        ended: when each last finished; due: when their gathers are, with what checkpoints gather together.
        recomputed: units that reentrant checkpoints will run again.
        gathers: what has a turn to be gathered: the sequence, and what checkpoints without reentrance run again that
            has no graph, before reentrant ones inside of these make it.
        begun: those that bring gradients and are not known to be over, the next last.
        several: units to which several graphs bring gradients.
        in_passes: those that ran in several passes, of which a backward may reach one alone.
        tied_owners: units whose parameters others use after they began.
        called_again: all that gradients come to more than once.
        reached_once: those that ran once, so that one part of this backward is all.
        recomputes: whether units ran without a graph, which reentrant checkpoints may still make.
        lifetimes: of units that this backward may come to more than once, not those that are over; the next to be over
            last.
        to_come: lifetimes of reentrant checkpoints that have not been gathered, the next last.
    """

    def __init__(self, record: ForwardRecord[U], will_recompute: Callable[[object], bool] = lambda each: True) -> None:
        self.sequence = record.anchored[::-1]
        self.planned = frozenset(self.sequence)
        self.began: dict[U, int] = {}
        self.ended: dict[U, int] = {}
        self.several: set[U] = set()
        self.in_passes: set[U] = set()
        self.tied_owners: set[U] = set()
        self._inside: dict[U, list[CheckpointRegion]] = {}  # for each use of a unit in checkpoints, the innermost
        self._read(record)
        self.due: Mapping[U, int] = self.ended
        self.gathers: Sequence[U] = self.sequence
        self.recomputed: frozenset[U] = frozenset()
        self._regions: list[CheckpointRegion] = []  # the reentrant ones
        self.called_again = self.several | self.tied_owners
        recomputed = [each for each in record.recomputed if will_recompute(each[2].checkpoint)]
        if recomputed:
            self._read_recomputed(recomputed)
        self.recomputes = record.may_recompute or bool(recomputed)
        self.reached_once = self.planned - self.several - record.begun_again - self.recomputed
        self.begun = [unit for unit in self.began if unit in self.planned or unit in self.recomputed]
        self.to_come: list[Lifetime[U]] = []
        self._lifetime_of: dict[U, Lifetime[U]] = {}
        self.lifetimes: list[Lifetime[U]] = []
        if self._inside or self.called_again:
            self._find_spans(Counter(each[0] for each in recomputed))
        self._passed = 0  # how many of the gathers were due later than what was reduced last began

    def _read(self, record: ForwardRecord[U]) -> None:
        began, several = self.began, self.several
        for log in record.passes:
            earlier = began.copy()  # what ran in several passes was called more than once
            for unit, now, how, inside in log.runs:
                if inside is not None:
                    self._inside.setdefault(unit, []).append(inside)
                if how != "none":
                    first = began.setdefault(unit, now)
                    if unit in earlier:
                        self.in_passes.add(unit)
                    if how == "again" or (first != now and (how == "graph" or unit in earlier)):
                        several.add(unit)
                    elif first != now:
                        self.tied_owners.add(unit)
            self.ended |= log.ended

    def _read_recomputed(self, recomputed: Iterable[tuple[U, int, CheckpointRegion]]) -> None:
        began = self.began
        for unit, now, inside in recomputed:
            if unit in began:
                self.called_again.add(unit)
            began[unit] = min(now, began.get(unit, now))
            self._inside.setdefault(unit, []).append(inside)
        self.recomputed = frozenset(unit for unit, _, _ in recomputed)
        self._regions = [*dict.fromkeys(region for _, _, region in recomputed)]
        self.began = dict(sorted(began.items(), key=itemgetter(1)))

    def _find_spans(self, recomputed: Mapping[U, int]) -> None:
        """`recomputed`: in how many uses reentrant checkpoints run units again."""
        began, due = self.began, self.ended.copy()
        for unit in {**self._inside, **dict.fromkeys(self.called_again)}:
            inside = self._inside.get(unit, ())
            outermost = {each.outermost: None for each in inside}
            if unit not in self.planned and all(each.checkpoint is not None for each in outermost):
                shared = unit in self.called_again
                self.to_come += [
                    Lifetime(unit, each.ended, each.began, each, shared, makes_graph=True) for each in outermost
                ]
                continue
            due[unit] = max([due.get(unit, 0), *(each.ended for each in outermost)])
            over = min(each.began for each in outermost) if outermost else began[unit]
            own = began.get(unit, over)
            lifetime = Lifetime(unit, due[unit], min(own, over))
            if unit in self.called_again and (unit in recomputed or unit in self.tied_owners):
                lifetime.shared = unit in recomputed or lifetime.over < own
            elif unit in recomputed or unit not in self.planned:
                lifetime.makes_graph = True
            elif lifetime.over < own:
                lifetime.reruns = sum(1 for each in inside for _ in each.outwards())
            elif unit not in self.called_again:
                continue  # the checkpoint is around it alone
            self._lifetime_of[unit] = lifetime
        if self._inside:
            self.due = due
            turns = dict.fromkeys((*self.sequence, *self._lifetime_of))
            self.gathers = tuple(sorted(turns, key=lambda unit: -due.get(unit, NEVER)))
        self.to_come.sort(key=attrgetter("due"))
        self.lifetimes = sorted([*self._lifetime_of.values(), *self.to_come], key=attrgetter("over"))

    # -- what is known -----------------------------------------------------------------------------------------------

    def lifetime_of(self, unit: U) -> Lifetime[U] | None:
        """The lifetime of `unit` that has begun or has a turn, and is not over; None for a unit that has one use, and
        none that a checkpoint runs again."""
        return self._lifetime_of.get(unit)

    def is_around(self, unit: U, others: Sequence[U]) -> bool:
        """Whether one of `others` began inside of `unit`, or after it."""
        own = self.began.get(unit, NEVER)
        return any(self.began.get(each, NEVER) > own for each in others)

    def due_before(self, group: Sequence[U]) -> Sequence[U]:
        """The units of which the gathers are due before the reduction of `group`, but for those that were handed out
        here."""
        began = self.began.get(group[0], NEVER) if len(group) == 1 else min(self.began.get(u, NEVER) for u in group)
        due, gathers, before = self.due, self.gathers, self._passed
        while self._passed < len(gathers) and due.get(gathers[self._passed], NEVER) > began:
            self._passed += 1
        return gathers[before : self._passed]

    # -- how far it has come -----------------------------------------------------------------------------------------

    def running(self, is_running: Callable[[object], bool]) -> CheckpointRegion | None:
        """What is recomputed by the reentrant checkpoint that `is_running`, or inside of its backward."""
        return next((each for each in reversed(self._regions) if is_running(each.checkpoint)), None)

    def begin_lifetime(self, unit: U, running: CheckpointRegion | None) -> Lifetime[U] | None:
        """`unit` is recomputed: its lifetime, if it has one."""
        for lifetime in reversed(self.to_come) if running is not None else ():
            if lifetime.unit == unit and lifetime.region is running:
                self._lifetime_of[unit] = lifetime
                return lifetime
        return self._lifetime_of.get(unit)

    def end_lifetime(self, lifetime: Lifetime[U]) -> None:
        """`lifetime`, the last of the lifetimes, is over."""
        self.lifetimes.pop()
        if self._lifetime_of.get(lifetime.unit) is lifetime:
            del self._lifetime_of[lifetime.unit]
