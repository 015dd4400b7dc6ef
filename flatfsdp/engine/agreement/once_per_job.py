"""Warnings that a job prints once, instead of once on each of its ranks.

[Note: one warning] A problem that all ranks find together, in an exchange, is reported by the first of them
(`errors.one_rank_warns`). A problem that each rank finds alone may exist on only one of them: the first rank with a
message leaves a note in the store and reports it, and the others with the same message log it. No rank waits for
another, and the store is used only if there is a problem to report.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import torch.distributed as dist

from ...errors import one_rank_warns, warn
from ..base.hashing import hash63
from ..watchdog.regions import current_watch

# The number of occurrences of each message on this rank; each occurrence is reported.
_had: Counter[str] = Counter()


def warn_once_per_job(message: str, *, names_rank: bool = False) -> None:
    """Warn on the first rank that has this `message`; other ranks that have it log it. One request to the store.

    `names_rank`: the problem may exist only on this rank, so the warning begins with the rank.
    """
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    first = alone or "fake" in str(dist.get_backend_config()) or _is_first_with(message)
    with one_rank_warns(this_rank=first):
        warn(message if alone or not names_rank else f"rank {dist.get_rank()}: {message}")


def _is_first_with(message: str) -> bool:
    _had[message] += 1
    own = str(dist.get_rank())
    with contextlib.suppress(RuntimeError):  # the store is gone: then the warning is printed, possibly twice
        return current_watch().store.set_if_absent(f"warning/{hash63(message):x}/{_had[message]}", own) == own
    return True
