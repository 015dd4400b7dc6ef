"""Collective calls outside of a model's iterations, in which all ranks meet in the store before they communicate.

[Note: calls] A communicator matches operations only by their order. If a rank were alone in a constructor, or in a
checkpoint's listing, its values would be exchanged for the others' parameters or gradients: gloo aborts the process
when sizes differ, without an explanation. So a rank in such a call first meets the others in the store, and the backend
is used when all have reached the same call. Ranks that make different calls fail at once. If the others train, or do
nothing, this rank waits as in any other wait ([Note: watch], [Note: deadlock]).

A meeting takes six requests to the store by each rank, and polls at growing intervals; calls are made between steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...errors import AgreementError, by_ranks
from ..base.foreign_text import one_line
from ..base.hashing import hash63
from ..base.wait_limits import keeps_program
from ..watchdog.regions import current_watch
from ..watchdog.store import PERIOD, StoreClient
from ..watchdog.watchdog import PATIENCE

SAME, DIFFERENT = "same", "different"  # verdicts of a meeting
READING = 2.5 * PERIOD  # seconds that ranks have to write their notes, and to read those of the others

# The number of calls by the same ranks. All of them have the same count, also after a process group was destroyed.
_made: Counter[str] = Counter()


_AFTER = " after it has issued "


def meet(process_group: Any, ranks: Sequence[int], call: str, issued: str = "") -> dict[int, str]:
    """Return when all `ranks`, those of `process_group`, make this `call`, which follows "rank 0 ". Collective.

    `issued`: the collectives before it, in words; returns those of all ranks if they differ, else {}. [Note: parted
    streams]

    Returns at once for fake process groups, and on threads in the background.

    Raises:
        AgreementError: on every rank: some ranks make another call, or the meeting can never complete.
    """
    if len(ranks) == 1 or "fake" in str(dist.get_backend_config(process_group)):
        return {}
    # A background thread has a group of its own, for calls that all ranks have already met for. If a rank dies, the
    # backend wakes the thread, while its wait in the store would not be watched.
    if not keeps_program():
        return {}
    watch = current_watch()
    notes = watch.store
    scope = f"{hash63(str(tuple(ranks))):x}"
    _made[scope] += 1
    prefix = f"call/{scope}/{_made[scope]}"
    call += issued and f"{_AFTER}{issued}"
    come(notes, prefix, call, len(ranks))
    before = None if watch.abandoned else watch.failure  # one that the program caught ends no later call
    verdict = notes.wait(lambda: watch.failure is not before or notes.read(f"{prefix}/verdict"), PATIENCE)
    if watch.failure is not None and watch.failure is not before:
        # Surviving ranks may not have reached this call: it is not counted.
        _made[scope] -= 1
        if notes.count(f"{prefix}/here", -1) == 0:
            notes.erase(f"{prefix}/first", f"{prefix}/here")
        raise watch.failure
    if verdict != SAME:
        notes.post(f"{prefix}/note/{dist.get_rank()}", call)
        texts = {rank: one_line(text) for rank, text in texts_at(notes, prefix, ranks).items()}
        notes.let_all_read(prefix, len(ranks), READING)
        calls = {rank: text.partition(_AFTER)[0] for rank, text in texts.items()}
        if len({*calls.values()}) == 1:
            return {rank: text.partition(_AFTER)[2] for rank, text in texts.items()}
        raise AgreementError(
            f"{by_ranks(calls)}. These calls are collective: all ranks must make the same, in the same order"
        )
    if dist.get_rank() == ranks[0]:  # all ranks are here, so all have left the previous call
        erase(notes, f"call/{scope}/{_made[scope] - 1}")
    return {}


def forget_calls() -> None:
    """Begin to count calls anew: the default process group is another one, with another store."""
    _made.clear()


# -- where ranks meet in the store -------------------------------------------------------------------------------------


def come(notes: StoreClient, prefix: str, what: str, ranks: int) -> int:
    """Register below `prefix` with operation `what`, and write the verdict if that decides it. Returns the number of
    ranks, of `ranks` in total, that are there for the same operation; 0 if one is there for another one."""
    if notes.set_if_absent(f"{prefix}/first", what) != what:
        notes.post(f"{prefix}/verdict", DIFFERENT)
        return 0
    here = notes.count(f"{prefix}/here")
    if here == ranks:
        notes.post(f"{prefix}/verdict", SAME)
    return here


def texts_at(
    notes: StoreClient, prefix: str, ranks: Sequence[int], absent: str = "has not reached this point"
) -> dict[int, str]:
    """The notes of `ranks` below `prefix`, by rank; `absent` for a rank that does not write one soon."""
    found: dict[int, str] = {}

    def all_there() -> bool:
        for rank in ranks:
            if rank not in found and (text := notes.read(f"{prefix}/note/{rank}")) is not None:
                found[rank] = text
        return len(found) == len(ranks)

    notes.wait(all_there, READING)
    return {rank: found.get(rank, absent) for rank in ranks}


def erase(notes: StoreClient, prefix: str, ranks: Sequence[int] = ()) -> None:
    """Erase the keys below `prefix`, and the notes of `ranks` there, after all ranks have read them."""
    notes.erase(f"{prefix}/first", f"{prefix}/here", f"{prefix}/verdict", *(f"{prefix}/note/{rank}" for rank in ranks))
