"""Comparison of the parameters of replicas: only if they are equal are gradients averaged over one model.

[Note: replicas] Ranks along the replicate axis hold bitwise equal pieces, at the beginning and, since their gradients
are equal, after every step. Differences (a checkpoint that one rank did not load, a write on one rank) persist, and
nothing else would show them. Checksums of each rank's pieces are exchanged as one number, and one by one only if those
differ; before the first training step, and once in `EVERY` backwards that reduce.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import few, ranks_by_value, ranks_in_words
from ..agreement.agreement import Agreement
from ..agreement.checksums import checksum
from ..agreement.rank_exchange import RankExchange
from ..base.hashing import hash63
from .model_facts import own_pieces
from .unit import Unit

EVERY = 1000

# The ranks that hold the same piece of a parameter, the parameter's path, and the checksum of this rank's piece.
Replicated = tuple[Sequence[int], str, int]


class ReplicaChecks:
    """The comparisons of one model: when all ranks are known to train, and once in `EVERY` backwards that reduce.

    Attributes:
        due: the number of backwards that reduce until the next comparison; None before the first one.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self.due: float | None = None if agreement.initial_values.check != "off" else math.inf

    def at_first(self, units: Sequence[Unit]) -> None:
        """All ranks have begun to train. Collective over all axes. Precondition: nothing was compared yet."""
        self.due = self._verify(units, again=False)

    def before_backward(self, units: Sequence[Unit], *, reduces: bool) -> None:
        """A backward begins on all ranks. Collective over all axes if a comparison is due."""
        if self.due is None:
            self.due = self._verify(units, again=False)
        elif reduces:
            self.due -= 1
            if not self.due:
                self.due = self._verify(units, again=True)

    def _verify(self, units: Sequence[Unit], *, again: bool) -> float:
        """Compare replicas, and report differences according to `check_values`. Returns the new `due`. `again`: they
        were equal in an earlier comparison."""
        if again and not all(map(_stays_alike, units)):
            return math.inf
        found = differences(self._agreement.peers, replicated_pieces(units))
        if not found:
            return EVERY if any(g.replicate is not None for unit in units for g in unit.axes.all) else math.inf
        if again:
            found = f"{found}. They were the same {EVERY:,} backwards before"
        if not self._agreement.initial_values.differ:  # else it was reported, for all ranks
            self._agreement.initial_values.report(self._agreement.peers, found)
        return math.inf


def replicated_pieces(units: Sequence[Unit]) -> list[Replicated]:
    """For each parameter with replicas, the ranks that hold the same piece, and this rank's checksum of it; 0 without a
    piece."""
    rows: list[Replicated] = []
    for unit in units:
        if all(groups.replicate is None for groups in unit.axes.all):
            continue
        pieces = own_pieces(unit)
        for handle in unit.handles:
            if (replicate := unit.axes.of(handle).replicate) is not None:
                for spec in handle.layout.params:
                    own = checksum(pieces[spec.name]) if spec.name in pieces else 0
                    rows.append((replicate.ranks, unit.entries.fqn(spec.name), own))
    return rows


def _stays_alike(unit: Unit) -> bool:
    """Whether replicas of `unit` get the same gradients: a user-defined hook instead of the all-reduce need not ensure
    that."""
    hook = unit.options.comm_hook
    return hook is None or unit.groups.shard.size > 1 or hook.alike


def differences(peers: RankExchange, rows: Sequence[Replicated]) -> str:
    """The parameters and ranks for which replicas differ, in words; "" for none. Collective over all axes."""
    if not rows:
        return ""
    sums = [checksum for _, _, checksum in rows]
    place = hash63(str([list(ranks) for ranks, _, _ in rows]))  # equal on ranks with the same replicas
    answers = peers.numbers_of_ranks(place, hash63(str(sums)))
    groups = ranks_by_value({rank: answers[rank][0] for rank in sorted(answers)})
    if all(len({answers[rank][1] for rank in ranks}) == 1 for ranks in groups.values()):
        return ""
    found = peers.numbers_of_ranks(place, *sums)
    different: dict[str, list[list[int]]] = {}  # groups of equal ranks, by name
    for ranks in groups.values():
        for (_, name, _), *totals in zip(rows, *(found[rank][1:] for rank in ranks), strict=True):
            alike = ranks_by_value(dict(zip(ranks, totals, strict=True)))
            if len(alike) > 1:
                different.setdefault(name, list(alike.values()))
    first, *rest = [name for _, name, _ in rows if name in different]
    return (
        f"replicas differ in {len(different)} of {len(rows)} parameters: {few([first, *rest])}. {first!r} is one on "
        f"{', another on '.join(map(ranks_in_words, different[first]))}. Gradients are averaged over replicas as if "
        "they were one model. Load the same checkpoint on all ranks, and write the same values to parameters on all of "
        "them"
    )
