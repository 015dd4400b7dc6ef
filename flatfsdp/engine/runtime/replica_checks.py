"""When replicas of a model's parameters are compared, and what becomes of those that differ. [Note: replicas]"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..agreement.agreement import Agreement
from ..agreement.checksums import checksum
from ..agreement.replicas import EVERY, Replicated, differences
from .model_facts import own_pieces
from .unit import Unit


class ReplicaChecks:
    """The comparisons of one model: when all ranks are known to train, and once in `EVERY` backwards that reduce.

    Attributes:
        due: after how many backwards that reduce replicas are compared again; None where they were not yet.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self.due: float | None = None if agreement.initial_values.check != "off" else math.inf

    def at_first(self, units: Sequence[Unit]) -> None:
        """All ranks have begun to train. Collective over all axes. Precondition: nothing was compared yet."""
        self.due = self._verify(units, again=False)

    def before_backward(self, units: Sequence[Unit], *, reduces: bool) -> None:
        """A backward begins on all ranks. Collective over all axes where a comparison is due."""
        if self.due is None:
            self.due = self._verify(units, again=False)
        elif reduces:
            self.due -= 1
            if not self.due:
                self.due = self._verify(units, again=True)

    def _verify(self, units: Sequence[Unit], *, again: bool) -> float:
        """Compare them, as `check_values` has it; after how many backwards that reduce it is due again. `again`: they
        were compared before, and were the same."""
        if again and not all(map(_stays_alike, units)):
            return math.inf
        found = differences(self._agreement.peers, replicated_pieces(units))
        if not found:
            return EVERY if any(unit.groups.replicate is not None for unit in units) else math.inf
        if again:
            found = f"{found}. They were the same {EVERY:,} backwards before"
        if not self._agreement.initial_values.differ:  # else it was reported, of all ranks
            self._agreement.initial_values.report(self._agreement.peers, found)
        return math.inf


def replicated_pieces(units: Sequence[Unit]) -> list[Replicated]:
    """Which ranks hold the same piece of each parameter that has replicas, and this rank's checksum of it; 0 where it
    has none."""
    rows: list[Replicated] = []
    for unit in units:
        if unit.groups.replicate is not None:
            pieces = own_pieces(unit)
            for handle in unit.handles:
                for spec in handle.layout.params:
                    own = checksum(pieces[spec.name]) if spec.name in pieces else 0
                    rows.append((unit.groups.replicate.ranks, unit.prefix + spec.name, own))
    return rows


def _stays_alike(unit: Unit) -> bool:
    """Whether replicas of `unit` get the same gradients: what a user's hook does in place of the all-reduce is its own
    affair."""
    hook = unit.options.comm_hook
    return hook is None or unit.groups.shard.size > 1 or hook.is_ours
