"""Whether replicas hold the same parameters: what is averaged over them is of one model only if they do.

[Note: replicas] Ranks along the replicate axis hold the same pieces, at the beginning and, since their gradients are
the same, after every step: to the bit. What differs by then (a checkpoint that one rank did not load, a write on one
rank) stays different for good, and nothing else would show it. Checksums of each rank's pieces are exchanged as one
number, and one by one only where those differ; before anything is trained, and once in `EVERY` backwards that reduce.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...errors import AgreementError, few, one_voice, ranks_in_words, warn
from ..base.hashing import hash63
from .checksums import checksum

if TYPE_CHECKING:
    from ..runtime.model import Root
    from ..runtime.unit import Unit


EVERY = 1000


def verify(root: Root, *, again: bool) -> float:
    """Compare replicas, as `check_values` says; after how many backwards that reduce it is due again. Collective over
    all axes.

    `again`: they were compared before, and were the same.
    """
    if again and not all(map(_stays_alike, root.units)):
        return math.inf
    found = differences(root)
    if not found:
        return EVERY if any(unit.groups.replicate is not None for unit in root.units) else math.inf
    if again:
        found = f"{found}. They were the same {EVERY:,} backwards before"
    if not root.agreement.values_differ:  # else it was said, of all ranks
        if root.agreement.check_values == "raise":
            raise AgreementError(found)
        with one_voice(speaks=root.agreement.is_first):
            warn(found)
    return math.inf


def _stays_alike(unit: Unit) -> bool:
    """Whether replicas of `unit` get the same gradients: what a user's hook does in place of the all-reduce is its own
    affair."""
    hook = unit.options.comm_hook
    return hook is None or unit.groups.shard.size > 1 or hook.is_ours


def differences(root: Root) -> str:
    """Which parameters differ between which replicas, in words; "" for none. Collective over all axes."""
    replicated = [(unit, unit.groups.replicate.ranks) for unit in root.units if unit.groups.replicate is not None]
    if not replicated:
        return ""
    sums = [total for unit, _ in replicated for total in _checksums(unit)]
    place = hash63(str([ranks for _, ranks in replicated]))  # who shares it has the same replicas
    answers = root.agreement.numbers_of_ranks(place, hash63(str(sums)))
    groups: dict[int, list[int]] = {}
    for rank in sorted(answers):
        groups.setdefault(answers[rank][0], []).append(rank)
    if all(len({answers[rank][1] for rank in ranks}) == 1 for ranks in groups.values()):
        return ""
    rows = root.agreement.rows_of_ranks(sums)
    names = [
        f"{unit.name}.{spec.name}" if unit.name else spec.name
        for unit, _ in replicated
        for handle in unit.handles
        for spec in handle.layout.params
    ]
    different: dict[str, list[list[int]]] = {}  # which ranks are alike
    for ranks in groups.values():
        for name, *found in zip(names, *(rows[rank] for rank in ranks), strict=True):
            alike: dict[int, list[int]] = {}
            for rank, total in zip(ranks, found, strict=True):
                alike.setdefault(total, []).append(rank)
            if len(alike) > 1:
                different.setdefault(name, list(alike.values()))
    first, *rest = [name for name in names if name in different]
    return (
        f"replicas differ in {len(different)} of {len(names)} parameters: {few([first, *rest])}. {first!r} is one on "
        f"{', another on '.join(map(ranks_in_words, different[first]))}. Gradients are averaged over replicas as if "
        "they were one model. Load the same checkpoint on all ranks, and write to parameters on all of them alike"
    )


def _checksums(unit: Unit) -> list[int]:
    """Of this rank's piece of each parameter; 0 where it has none."""
    sums = []
    for handle in unit.handles:
        own = {owned.index: checksum(handle.shard[owned.in_shard.slice]) for owned in handle.layout.owned(handle.rank)}
        sums += [own.get(index, 0) for index in range(len(handle.leaves))]
    return sums
