"""The clock of one backward: when, counted down from the end of the forward, units are due; pure. [Note: one clock]"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from .order import ForwardRecord

U = TypeVar("U", bound=Hashable)
NEVER = math.inf  # when a unit ended that did not run in a pass, and when it began


class BackwardClock(Generic[U]):
    """What a record tells of a backward over it, and how far this has come.

    Attributes:
        sequence: the units of the plan, in the order in which they are reached, if they are; planned: the same.
        began: when units began that the backward may reach.
        due: when gathers of the plan are; ended: the same, without what checkpoints gather together.
        begun: those that are not known to be over, the next last.
        again: units outside of the plan that ran more than once, at least the last time without a graph.
        called_again: these, and those that have several graphs.
        reached_once: those that ran once, so that one part of this backward is all.
        recomputes: whether units ran without a graph, which reentrant checkpoints may still make.
    """

    def __init__(self, record: ForwardRecord[U]) -> None:
        span = self.span = record.span
        self.sequence = record.anchored[::-1]
        self.planned = frozenset(self.sequence)
        self.recomputes = record.may_recompute or bool(span.unseen)
        self.ended, self.due = span.ended, span.due
        self.again = record.begun_again.difference(self.planned)
        self.called_again = span.again | self.again
        self.reached_once = self.planned - span.again - record.begun_again
        self.began: dict[U, int] = span.began
        if self.again:
            began = span.began | {unit: record.began(unit) for unit in self.again}
            self.began = dict(sorted(began.items(), key=lambda item: item[1]))
        self.begun = [unit for unit in self.began if unit in self.planned or unit in self.again]
        self._passed = 0  # how many of the sequence were due to be gathered later than what was reduced last began

    def has_more_calls(self, unit: U) -> bool:
        """Whether `unit` has several graphs."""
        return unit in self.span.again and unit not in self.again

    def waits_for_first_call(self, unit: U) -> bool:
        """Whether `unit` is reduced when this backward is through with its first call, wherever its gradients come
        from: units that have no graph yet, and are none of the plan, may have begun later. [Note: recomputed]"""
        return unit in self.again or (self.recomputes and unit in self.span.again)

    def is_around(self, unit: U, others: Sequence[U]) -> bool:
        """Whether one of `others` began inside of `unit`, or after it."""
        own = self.began.get(unit, NEVER)
        return any(self.began.get(each, NEVER) > own for each in others)

    def due_before(self, group: Sequence[U]) -> Sequence[U]:
        """The units of which the gathers are due before the reduction of `group`, but for those that were handed out
        here."""
        began = self.began.get(group[0], NEVER) if len(group) == 1 else min(self.began.get(u, NEVER) for u in group)
        due, sequence, before = self.due, self.sequence, self._passed
        while self._passed < len(sequence) and due.get(sequence[self._passed], NEVER) > began:
            self._passed += 1
        return sequence[before : self._passed]
