"""Warnings that a job gives once, and not once on each of its ranks.

[Note: one warning] What ranks find together, in an exchange, the first of them reports (`errors.one_rank_warns`). What
each finds may be there on one rank alone: the first one that has it leaves a note in the store and reports it, and the
others, whose words are the same, have it in their log. No rank waits for another, and nothing is requested of the store
unless there is something to report.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import torch.distributed as dist

from ...errors import one_rank_warns, warn
from ..base.hashing import hash63
from ..watchdog.regions import current_watch

# How often this rank has had which message: each time is one to report.
_had: Counter[str] = Counter()


def warn_once_per_job(message: str, *, names_rank: bool = False) -> None:
    """Warn on the first rank that has this `message`; others that have it as well log it. One request to the store.

    `names_rank`: what it is of may have happened on this rank alone, so the warning begins with the rank.
    """
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    first = alone or "fake" in str(dist.get_backend_config()) or _is_first_with(message)
    with one_rank_warns(this_rank=first):
        warn(message if alone or not names_rank else f"rank {dist.get_rank()}: {message}")


def _is_first_with(message: str) -> bool:
    _had[message] += 1
    own = str(dist.get_rank())
    with contextlib.suppress(RuntimeError):  # the store is gone: better twice than never
        return current_watch().store.set_if_absent(f"warning/{hash63(message):x}/{_had[message]}", own) == own
    return True
