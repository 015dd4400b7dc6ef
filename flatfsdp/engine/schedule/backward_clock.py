"""The clock of one backward: when, counted down from the end of the forward, units are due; pure. [Note: one clock]"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Generic, TypeVar

from .forward_record import CheckpointRegion, ForwardRecord

U = TypeVar("U", bound=Hashable)
NEVER = math.inf  # when a unit ended that did not run in a pass, and when it began


class BackwardClock(Generic[U]):
    """What a record has of a backward over it, and how far this has come.

    Attributes:
        sequence: the units of the plan, in the order in which they are reached, if they are; planned: the same.
        began: when units began that the backward may reach, in that order.
        ended: when each last finished; due: when their gathers are, with what checkpoints gather together.
        repeated: units outside of the plan that checkpoints without reentrance run again without a graph, before
            reentrant ones inside of these do with one, and when their gathers are due: with the others in there.
        gathers: what has a turn to be gathered: the sequence and these.
        begun: those that are not known to be over, the next last.
        several: units to which several graphs, or a graph and a recomputation, bring gradients.
        in_passes: those that ran in several passes, of which a backward may reach one alone.
        tied_owners: units whose parameters others use after they began.
        again: units outside of the plan that ran more than once, at least the last time without a graph.
        called_again: all of these.
        reached_once: those that ran once, so that one part of this backward is all.
        regions: what checkpoints without reentrance will recompute.
        inside: the innermost of these, one for each call of a unit in any.
        recomputes: whether units ran without a graph, which reentrant checkpoints may still make.
    """

    def __init__(self, record: ForwardRecord[U]) -> None:
        self.sequence = record.anchored[::-1]
        self.planned = frozenset(self.sequence)
        self.began: dict[U, int] = {}
        self.ended: dict[U, int] = {}
        self.several: set[U] = set()
        self.in_passes: set[U] = set()
        self.tied_owners: set[U] = set()
        self.inside: dict[U, list[CheckpointRegion]] = {}
        unseen = self._read(record)
        self.regions = {each: None for inside in self.inside.values() for inner in inside for each in inner.outwards()}
        self.due = self._due() if self.regions else self.ended
        self.repeated = record.repeated() if record.ran_without_graph else {}
        self.gathers = self._with_repeated() if self.repeated else self.sequence
        self.recomputes = record.may_recompute or bool(unseen)
        self.again = record.begun_again.difference(self.planned)
        self.called_again = self.several | self.tied_owners | self.again
        self.reached_once = self.planned - self.several - record.begun_again
        for unit in self.again:
            self.began[unit] = record.began(unit)
        if self.again or unseen:
            self.began = dict(sorted(self.began.items(), key=itemgetter(1)))
        self.begun = [unit for unit in self.began if unit in self.planned or unit in self.again]
        self._passed = 0  # how many of the gathers were due later than what was reduced last began

    def _read(self, record: ForwardRecord[U]) -> Mapping[U, int]:
        """What the passes have; returned: units that ran with a graph, and without one that a reentrant checkpoint will
        make: a recomputation brings them gradients beside those that their graph brings."""
        began, several = self.began, self.several
        unseen: dict[U, int] = {}
        for log in record.passes:
            earlier = began.copy()  # what ran in several passes was called more than once
            for unit, now, how, inside in log.runs:
                if inside is not None:
                    self.inside.setdefault(unit, []).append(inside)
                if how == "recomputed":
                    unseen.setdefault(unit, now)
                elif how != "none":
                    first = began.setdefault(unit, now)
                    if unit in earlier:
                        self.in_passes.add(unit)
                    if how == "again" or (first != now and (how == "graph" or unit in earlier)):
                        several.add(unit)
                    elif first != now:
                        self.tied_owners.add(unit)
            self.ended |= log.ended
        unseen = {unit: now for unit, now in unseen.items() if unit in began}
        several.update(unseen)
        began |= {unit: min(now, began[unit]) for unit, now in unseen.items()}
        return unseen

    def _due(self) -> Mapping[U, int]:
        due = self.ended.copy()
        in_order = sorted(due, key=due.__getitem__)
        ends = [due[unit] for unit in in_order]
        for region in sorted(self.regions, key=lambda region: region.ended):  # one that is around others ended last
            inside = slice(bisect_right(ends, region.began), bisect_left(ends, region.ended))
            due.update(dict.fromkeys(in_order[inside], region.ended))
        return due

    def _with_repeated(self) -> tuple[U, ...]:
        due = {**self.due, **self.repeated}
        return tuple(sorted((*self.sequence, *self.repeated), key=lambda unit: -due.get(unit, NEVER)))

    def has_more_calls(self, unit: U) -> bool:
        """Whether `unit` has several graphs."""
        return unit in self.several and unit not in self.again

    def waits_for_first_call(self, unit: U) -> bool:
        """Whether `unit` is reduced when this backward is through with its first call, wherever its gradients come
        from: units that have no graph yet, and are none of the plan, may have begun later, and what it recomputes
        itself brings gradients of which nothing is known before. [Note: recomputed]"""
        return unit in self.called_again

    def is_around(self, unit: U, others: Sequence[U]) -> bool:
        """Whether one of `others` began inside of `unit`, or after it."""
        own = self.began.get(unit, NEVER)
        return any(self.began.get(each, NEVER) > own for each in others)

    def due_from(self, tick: float) -> Sequence[U]:
        """The units whose gathers are due when the clock has come down to `tick`."""
        return [unit for unit in self.gathers if self.due.get(unit, self.repeated.get(unit, NEVER)) >= tick]

    def due_before(self, group: Sequence[U]) -> Sequence[U]:
        """The units of which the gathers are due before the reduction of `group`, but for those that were handed out
        here."""
        began = self.began.get(group[0], NEVER) if len(group) == 1 else min(self.began.get(u, NEVER) for u in group)
        due, gathers, before = self.due, self.gathers, self._passed
        while (
            self._passed < len(gathers)
            and due.get(unit := gathers[self._passed], self.repeated.get(unit, NEVER)) > began
        ):
            self._passed += 1
        return gathers[before : self._passed]
