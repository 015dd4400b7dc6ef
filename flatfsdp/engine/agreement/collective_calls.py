"""Calls outside of a model's iterations, in which all ranks meet before they send each other anything.

[Note: calls] A communicator matches operations by their order alone. A rank that is alone in a constructor, or in a
checkpoint's listing, would exchange its values for the others' parameters or gradients: gloo ends the process
where sizes differ, and nobody would learn why. So whoever comes to such a call meets the others in the store first, and
the backend is used when all have come to the same one. Ranks that make different calls fail at once; for ranks that
train instead, or do nothing, this one waits as anywhere else ([Note: watch], [Note: deadlock]).

It costs a rank six requests to the store and its looks for the others, ever more rarely; calls are made between steps.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...errors import AgreementError, by_ranks
from ..base.foreign_text import one_line
from ..base.hashing import hash63
from ..watchdog.regions import current_watch
from ..watchdog.store import PERIOD, StoreClient
from ..watchdog.watchdog import PATIENCE

SAME, DIFFERENT = "same", "different"  # what a meeting of ranks ends with
READING = 2.5 * PERIOD  # seconds that ranks have to write what they do, and to read what others do

# How many calls were made by the same ranks. All of them count alike, also beyond the end of a process group.
_made: Counter[str] = Counter()


def meet(process_group: Any, ranks: Sequence[int], call: str) -> None:
    """Return when all `ranks`, those of `process_group`, make this `call`, which follows "rank 0 ". Collective.

    Process groups that move nothing have no other ranks, and threads beside the main one do not meet.

    Raises:
        AgreementError: on every rank: some make another one, or none of them will ever come to it.
    """
    if len(ranks) == 1 or "fake" in str(dist.get_backend_config(process_group)):
        return
    # A thread beside the program has a group of its own, on which all ranks make the calls that they have met for
    # before; there the backend wakes it if a rank dies, and a wait in the store nobody watches.
    if threading.current_thread() is not threading.main_thread():
        return
    watch = current_watch()
    notes = watch.store
    scope = f"{hash63(str(tuple(ranks))):x}"
    _made[scope] += 1
    place = f"call/{scope}/{_made[scope]}"
    come(notes, place, call, len(ranks))
    before = watch.failure
    verdict = notes.wait(lambda: watch.failure is not before or notes.read(f"{place}/verdict"), PATIENCE)
    if watch.failure is not None and watch.failure is not before:
        # Whoever lives on has not been here: the others count this call no more.
        _made[scope] -= 1
        if notes.count(f"{place}/here", -1) == 0:
            notes.erase(f"{place}/first", f"{place}/here")
        raise watch.failure
    if verdict != SAME:
        notes.post(f"{place}/note/{dist.get_rank()}", call)
        reported = by_ranks({rank: one_line(text) for rank, text in texts_at(notes, place, ranks).items()})
        notes.let_all_read(place, len(ranks), READING)
        raise AgreementError(f"{reported}. These calls are collective: all ranks must make the same, in the same order")
    if dist.get_rank() == ranks[0]:  # all have come here, and so have left the call before
        erase(notes, f"call/{scope}/{_made[scope] - 1}")


# -- a place in the store where ranks meet -----------------------------------------------------------------------------


def come(notes: StoreClient, place: str, what: str, ranks: int) -> int:
    """Come to `place` to do `what`, and write the verdict if that decides it. Returns how many of so many `ranks` have
    come for the same; 0 where one has come for something else."""
    if notes.set_if_absent(f"{place}/first", what) != what:
        notes.post(f"{place}/verdict", DIFFERENT)
        return 0
    here = notes.count(f"{place}/here")
    if here == ranks:
        notes.post(f"{place}/verdict", SAME)
    return here


def texts_at(
    notes: StoreClient, place: str, ranks: Sequence[int], absent: str = "has not come that far"
) -> dict[int, str]:
    """What `ranks` do at `place`, each as it has written itself; `absent` for one that does not write soon."""
    found: dict[int, str] = {}

    def all_there() -> bool:
        for rank in ranks:
            if rank not in found and (text := notes.read(f"{place}/note/{rank}")) is not None:
                found[rank] = text
        return len(found) == len(ranks)

    notes.wait(all_there, READING)
    return {rank: found.get(rank, absent) for rank in ranks}


def erase(notes: StoreClient, place: str, ranks: Sequence[int] = ()) -> None:
    """Nobody will read what stands at `place` any more, and what these `ranks` have written there."""
    notes.erase(f"{place}/first", f"{place}/here", f"{place}/verdict", *(f"{place}/note/{rank}" for rank in ranks))
