"""Units that are unsharded between iterations, and writes of users to their shards.

[Note: writes at rest] Between iterations users may write to shards. That is detected before a unit is gathered again,
by versions. Values are compared only where writes may change no version ([Note: unnoticed writes]).
"""

from __future__ import annotations

from collections.abc import Iterable

from ..base.peers import Peers
from ..flat.states import GATHERING, SHARDED, UNSHARDED
from ..flat.views import SHOWS_SHARD
from .unit import Unit


def free_stale(units: Iterable[Unit]) -> None:
    """Free kept parameters of `units` that differ from those that a gather would yield: the shard was written to since,
    or the dtype is that of evaluation, and this is training."""
    for unit in units:
        for handle, views, _ in unit.kinds:
            if handle.state is GATHERING and handle.writes.was_written_since_gathered:  # on a user's request
                unit.resources.free(handle)
            if views.mode is not SHOWS_SHARD:
                continue
            if (release := handle.face.release) is not None and release():
                handle.face.release = None
            if handle.state is UNSHARDED and (
                handle.writes.is_stale or handle.unsharded.dtype != unit.dtype_of(handle)
            ):
                unit.resources.free(handle)
            if handle.kept_source is not None and handle.state is SHARDED:
                handle.drop_stale_source()


def follow_other_ranks(units: Iterable[Unit], agreement: Peers) -> None:
    """Free those of `units` that are kept by choice, to be gathered again, if any rank has written to its shards.
    Collective if there are any. An optimizer writes on some ranks only, if others have no element of a unit.
    """
    kept = [unit for unit in units if unit.kept.by_choice]
    if kept and agreement.any_rank(not all(unit.is_unsharded for unit in kept)):
        for unit in kept:
            unit.reshard(SHOWS_SHARD)
    for unit in kept:
        unit.kept.end_choice()
