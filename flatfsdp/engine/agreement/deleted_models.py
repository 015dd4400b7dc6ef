"""Notes in place of ranks that do not answer any more because their models were deleted.

[Note: deleted models] A rank continues without a note if its op was expected; if another rank's op was not, its
watchdog leaves the note later ([Note: agreement]), for as long as the model exists. So a rank whose model is deleted
records its last ops in the store, and ranks that wait for its note look for such a record after a while. One of them
leaves the notes: it reads the records of all ranks, once for each number of deleted models. A deletion takes three
requests, and a long wait one more for each check.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from ..base.foreign_text import parse
from ..watchdog.store import StoreClient
from .collective_calls import come
from .ops import Op

LAST = 4  # ops in a record
LONGEST = 400  # characters of their descriptions


def record(logged: Iterable[tuple[int, Op, int]], *, rank: int, scope: str, store: StoreClient) -> None:
    """Record that the model `scope` of this `rank` was deleted after the `logged` ops: (place, op, step) of each."""
    last = [[at, op.code, op.words[:LONGEST]] for at, op, _ in logged][-LAST:]
    store.post(f"{scope}/deleted/{rank}", json.dumps(last))
    store.count(f"{scope}/deleted")


def leave_notes(at: int, known: int, *, rank: int, ranks: Sequence[int], scope: str, store: StoreClient) -> int:
    """Leave the notes at place `at` of those `ranks` whose models were deleted, if these are more than `known`; returns
    how many they are. Only the first `rank` that calls it for a place and a number leaves any."""
    place, deleted = f"{scope}/{at}", store.count(f"{scope}/deleted", 0)
    if deleted > known and store.set_if_absent(f"{place}/by/{deleted}", str(rank)) == str(rank):
        for each in ranks:
            text = store.read(f"{scope}/deleted/{each}")
            if text is not None and store.read(f"{place}/note/{each}") is None:
                op = _op_at(at, parse(text))
                store.post(f"{place}/note/{each}", op.to_text())
                come(store, place, str(op.code), len(ranks))
    return deleted


def _op_at(at: int, recorded: object) -> Op:
    """The op at place `at` of a rank with this record, or what it did instead."""
    last = -1
    for entry in recorded if isinstance(recorded, list) else ():
        match entry:
            case [int(place), int(code), str(words)]:
                last = max(last, place)
                if place == at:
                    return Op(code, words)
    return Op(-1, "passed this point long ago and deleted its model" if last > at else "deleted its model")
