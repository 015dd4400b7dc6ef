"""Calls outside of a model's iterations, in which all ranks meet before they send each other anything.

[Note: calls] A communicator tells operations apart by their order alone. A rank that is alone in a constructor, or in a
checkpoint's listing, would exchange what it has to say for the others' parameters or gradients: gloo ends the process
where sizes differ, and nobody would learn why. So whoever comes to such a call meets the others in the store first, and
the backend is used when all have come to the same one. Ranks that make different calls are told at once; for ranks that
train instead, or do nothing, this one waits as anywhere else ([Note: watch], [Note: deadlock]).

It costs a rank six requests to the store and its looks for the others, ever more rarely; calls are made between steps.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...errors import AgreementError, by_ranks
from ..base.foreign_text import one_line
from ..base.hashing import hash63
from ..watchdog import store as board
from ..watchdog.regions import current_watch
from ..watchdog.watchdog import PATIENCE, Watchdog

_SAME, _DIFFERENT = "same", "different"

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
    if notes.set_if_absent(f"{place}/first", call) != call:
        notes.post(f"{place}/verdict", _DIFFERENT)
    elif notes.count(f"{place}/here") == len(ranks):
        notes.post(f"{place}/verdict", _SAME)
    before = watch.failure
    verdict = notes.wait(lambda: watch.failure is not before or notes.read(f"{place}/verdict"), PATIENCE)
    if watch.failure is not None and watch.failure is not before:
        # Whoever lives on has not been here: the others count this call no more.
        _made[scope] -= 1
        if notes.count(f"{place}/here", -1) == 0:
            notes.erase(f"{place}/first", f"{place}/here")
        raise watch.failure
    if verdict != _SAME:
        raise _differ(watch, place, ranks, call)
    if dist.get_rank() == ranks[0]:  # all have come here, and so have left the call before
        old = f"call/{scope}/{_made[scope] - 1}"
        notes.erase(f"{old}/first", f"{old}/here", f"{old}/verdict")


def _differ(watch: Watchdog, place: str, ranks: Sequence[int], call: str) -> AgreementError:
    """What each rank called."""
    notes = watch.store
    notes.post(f"{place}/says/{dist.get_rank()}", call)
    said: dict[int, str] = {}

    def all_there() -> bool:
        for rank in ranks:
            if rank not in said and (found := notes.read(f"{place}/says/{rank}")) is not None:
                said[rank] = one_line(found)
        return len(said) == len(ranks)

    notes.wait(all_there, 2.5 * board.PERIOD)
    reported = by_ranks({rank: said.get(rank, "has not come that far") for rank in ranks})
    notes.count(f"{place}/read")
    notes.wait(functools.partial(_all_have_read, notes, place, len(ranks)), 2.5 * board.PERIOD)
    return AgreementError(f"{reported}. These calls are collective: all ranks must make the same, in the same order")


def _all_have_read(notes: board.StoreClient, place: str, readers: int) -> bool:
    return notes.count(f"{place}/read", 0) >= readers
