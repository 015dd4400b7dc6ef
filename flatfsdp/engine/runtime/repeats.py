"""What checkpoints run again in one backward, and may still."""

from __future__ import annotations

import bisect
import math
from collections.abc import Container, Mapping, Sequence

from ..base import _torch
from ..flat.views import SHOWS_NOTHING
from ..schedule.order import CheckpointRegion, ExecutionInterval
from .unit import Unit, is_in_call


class RecomputedUnits:
    """Which units stay whole since a checkpoint may run them again: a rank that freed one would gather it alone.

    Attributes:
        segments: what checkpoints without reentrance run again.
        held_unsharded: units that are through, and when what they may be recomputed with began.
        used_repeatedly: units outside of the plan that a reentrant checkpoint ran or lent more than once, and its node.
    """

    def __init__(self, span: ExecutionInterval[Unit], began: Mapping[Unit, int]) -> None:
        self.segments = tuple(span.segments)
        self.held_unsharded: dict[Unit, int] = {}
        self.used_repeatedly: dict[Unit, int] = {}
        self._span = span
        self._began = began
        lasting = [each for each in self.segments if each.ended > each.began]
        self._begins = sorted(each.began for each in lasting)
        self._ends = sorted(each.ended for each in lasting)
        self._runs: dict[Unit, int] = {}  # how many times those of the plan have run again
        self._runs_in_first_call: dict[Unit, int] = {}  # while the backward of the first of their calls went on
        self._used_in: dict[Unit, int] = {}  # the node whose backward ran them again last, or lent them

    def record_run(self, unit: Unit) -> None:
        """`unit`, which is of the plan, runs again."""
        self._runs[unit] = self._runs.get(unit, 0) + 1
        if unit in self._span.again and is_in_call(unit, self._began.get(unit)):
            self._runs_in_first_call[unit] = self._runs_in_first_call.get(unit, 0) + 1

    def are_over(self, unit: Unit) -> bool:
        """Whether all checkpoints around its first call have run `unit` again: each runs what is inside of it once."""
        own = self._began.get(unit, math.inf)
        # Those that had begun by then, less those that had ended: not one by one, since every unit asks.
        around = bisect.bisect_right(self._begins, own) - bisect.bisect_right(self._ends, own)
        if unit not in self._span.again:
            return self._runs.get(unit, 0) >= around
        return self._runs_in_first_call.get(unit, 0) >= around or self._runs.get(unit, 0) >= self._of_all_calls(unit)

    def _of_all_calls(self, unit: Unit) -> int:
        count = 0
        for innermost in self._span.inside.get(unit, ()):
            around: CheckpointRegion | None = innermost
            while around is not None:
                count, around = count + 1, around.around
        return count

    def hold(self, unit: Unit, begun: Sequence[Unit]) -> bool:
        """Whether `unit` stays whole until what may be recomputed with it is over; `begun`: what is not, the next
        last."""
        own = self._began.get(unit, math.inf)
        held_for = min((each.began for each in self.segments if each.began < own < each.ended), default=math.inf)
        holds = bool(begun) and self._began[begun[-1]] >= held_for
        if holds:
            self.held_unsharded[unit] = int(held_for)
        return holds

    def record_use(self, unit: Unit, plan: Container[Unit]) -> None:
        """`unit` runs again in a reentrant checkpoint: it, or an owner, may do so more than once in the same."""
        now = _torch.running_node()
        for each in (*unit.owning_units, unit):
            if each not in plan:
                if self._used_in.get(each) == now:
                    self.used_repeatedly[each] = now
                self._used_in[each] = now

    def free_used_repeatedly(self, kept: Container[Unit]) -> None:
        """Free what other nodes than the running one used more than once, but what is `kept`."""
        now = _torch.running_node()
        for unit, node in tuple(self.used_repeatedly.items()):
            if node != now:
                del self.used_repeatedly[unit]
                if unit not in kept:
                    unit.reshard(SHOWS_NOTHING)
