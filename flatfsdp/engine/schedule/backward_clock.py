"""The clock of one backward, whose ticks are counted down from the end of the forward; pure. [Note: one clock]

[Note: lifetimes] A unit that a backward may reach more than once has one *lifetime*, the interval of the clock in which
it is unsharded. It is gathered once in it, in its turn, when the first of its uses is due, and freed when the clock has
passed the last: the beginning of its first call, or of the region that a checkpoint may recompute with that. Ranks
reach different uses, so a rank frees a unit earlier only if it is alone in a reentrant checkpoint, and all of its
gradients have come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Generic, TypeVar

from .forward_schedule import CheckpointRegion, ForwardRecord

U = TypeVar("U", bound=Hashable)
NEVER = math.inf  # the tick of the beginning and the end of a unit that did not run in a pass


@dataclass(eq=False)
class Lifetime(Generic[U]):
    """The interval of the clock in which `unit` is unsharded. [Note: lifetimes]

    Attributes:
        over: the tick at which it is freed at the latest.
        until_over: whether it is freed at that tick, and not when all gradients have come.
    """

    unit: U
    over: int
    until_over: bool = True


class BackwardClock(Generic[U]):
    """The plan of a backward, computed from a record, and its progress.

    Attributes:
        sequence: the units of the plan, in the order in which they are reached, if they are; planned: as a set.
        began: the ticks at which units began that the backward may reach, in ascending order.
        ended: the ticks at which units last finished; due: those at which their gathers are due, with checkpoints'.
        recomputed: units that reentrant checkpoints will run again.
        gathers: units whose gathers have a turn: the sequence, and units without a graph that checkpoints run again.
        begun: units that get gradients and are not known to be over, the next one last.
        several: units that get gradients from several graphs.
        in_passes: units that ran in several passes, of which a backward may reach only one.
        tied_owners: units whose parameters others use after they began.
        called_again: all units that gradients reach more than once.
        reached_once: units that ran once, which have only one part in this backward.
        recomputes: whether units ran without a graph, so that reentrant checkpoints may still make one.
        lifetimes: those that are not over; the next to end is the last.
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
        self._regions: tuple[CheckpointRegion, ...] = ()  # the reentrant ones
        self.called_again = self.several | self.tied_owners
        recomputed = [each for each in record.recomputed if will_recompute(each[2].checkpoint)]
        if recomputed:
            self._read_recomputed(recomputed)
        self.recomputes = record.may_recompute or bool(recomputed)
        self.reached_once = self.planned - self.several - record.begun_again - self.recomputed
        self.begun = [unit for unit in self.began if unit in self.planned or unit in self.recomputed]
        self._lifetime_of: dict[U, Lifetime[U]] = {}
        self.lifetimes: list[Lifetime[U]] = []
        if self._inside or self.called_again:
            self._find_spans()

    def _read(self, record: ForwardRecord[U]) -> None:
        began, several = self.began, self.several
        for log in record.passes:
            earlier = began.copy()  # units that ran in several passes were called more than once
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
        self._regions = tuple(dict.fromkeys(region for _, _, region in recomputed))
        self.began = dict(sorted(began.items(), key=itemgetter(1)))

    def _find_spans(self) -> None:
        """Compute the lifetimes."""
        began, due = self.began, self.ended.copy()
        for unit in {**self._inside, **dict.fromkeys(self.called_again)}:
            outermost = [each.outermost for each in self._inside.get(unit, ())]
            if unit not in self.planned and not outermost:
                continue  # its forward runs: no backward inside of it reaches it
            due[unit] = max([due.get(unit, 0), *(each.ended for each in outermost)])
            over = min([each.began for each in outermost], default=began.get(unit, 0))
            own = began.get(unit, over)
            if unit in self.called_again:
                # One without checkpoints is freed when its first call is over.
                until_over = unit in self.recomputed or over < own
            elif unit in self.recomputed:
                until_over = False
            elif over < own or unit not in self.planned:
                until_over = True
            else:
                continue  # the checkpoint contains only this unit
            self._lifetime_of[unit] = Lifetime(unit, min(own, over), until_over)
        if self._inside:
            self.due = due
            turns = dict.fromkeys((*self.sequence, *self._lifetime_of))
            self.gathers = tuple(sorted(turns, key=lambda unit: -due.get(unit, NEVER)))
        self.lifetimes = sorted(self._lifetime_of.values(), key=attrgetter("over"))

    # -- properties of units -----------------------------------------------------------------------------------------

    def lifetime_of(self, unit: U) -> Lifetime[U] | None:
        """The lifetime of `unit`, if it is not over; None for a unit with one use that no checkpoint runs again."""
        return self._lifetime_of.get(unit)

    def began_first(self, group: Sequence[U]) -> float:
        """The tick at which the first of `group` began."""
        return min([self.began.get(unit, NEVER) for unit in group])

    # -- progress ----------------------------------------------------------------------------------------------------

    def running(self, is_running: Callable[[object], bool]) -> CheckpointRegion | None:
        """The region of the reentrant checkpoint that `is_running`, or inside of whose backward this is."""
        return next((each for each in reversed(self._regions) if is_running(each.checkpoint)), None)

    def end_lifetime(self, lifetime: Lifetime[U]) -> None:
        """End `lifetime`, the last one in `lifetimes`."""
        self.lifetimes.pop()
        del self._lifetime_of[lifetime.unit]
