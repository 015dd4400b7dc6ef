"""Whether replicas hold the same parameters: what is averaged over them is of one model only if they do.

[Note: replicas] Ranks along the replicate axis hold the same pieces, at the beginning and, since their gradients are
the same, after every step: to the bit. What differs by then (a checkpoint that one rank did not load, a write on one
rank) stays different for good, and nothing else would show it. Checksums of each rank's pieces are exchanged as one
number, and one by one only where those differ; before anything is trained, and once in `EVERY` backwards that reduce.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import few, ranks_by_value, ranks_in_words
from ..base.hashing import hash63
from .rank_exchange import RankExchange

EVERY = 1000

# The ranks that hold the same piece of a parameter, the parameter's path, and the checksum of this rank's piece.
Replicated = tuple[Sequence[int], str, int]


def differences(peers: RankExchange, rows: Sequence[Replicated]) -> str:
    """Which parameters differ between which replicas, in words; "" for none. Collective over all axes."""
    if not rows:
        return ""
    sums = [checksum for _, _, checksum in rows]
    place = hash63(str([list(ranks) for ranks, _, _ in rows]))  # who shares it has the same replicas
    answers = peers.numbers_of_ranks(place, hash63(str(sums)))
    groups = ranks_by_value({rank: answers[rank][0] for rank in sorted(answers)})
    if all(len({answers[rank][1] for rank in ranks}) == 1 for ranks in groups.values()):
        return ""
    found = peers.rows_of_ranks(sums)
    different: dict[str, list[list[int]]] = {}  # which ranks are alike
    for ranks in groups.values():
        for (_, name, _), *totals in zip(rows, *(found[rank] for rank in ranks), strict=True):
            alike = ranks_by_value(dict(zip(ranks, totals, strict=True)))
            if len(alike) > 1:
                different.setdefault(name, list(alike.values()))
    first, *rest = [name for _, name, _ in rows if name in different]
    return (
        f"replicas differ in {len(different)} of {len(rows)} parameters: {few([first, *rest])}. {first!r} is one on "
        f"{', another on '.join(map(ranks_in_words, different[first]))}. Gradients are averaged over replicas as if "
        "they were one model. Load the same checkpoint on all ranks, and write to parameters on all of them alike"
    )
