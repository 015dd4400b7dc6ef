"""Notes in a store that several write to and read from."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from flatfsdp.engine.watchdog.store import StoreClient
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.unit


def notes_in(store: dist.Store) -> StoreClient:
    store.set_timeout(timedelta(seconds=1))
    return StoreClient(store)


def tcp() -> dist.Store:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


STORES = pytest.mark.parametrize("make", [dist.HashStore, tcp])


@STORES
def test_what_stands_there(make: Callable[[], dist.Store]) -> None:
    store = make()
    notes = notes_in(store)
    assert notes.read("verdict") is None
    assert (
        notes.set_if_absent("verdict", "same")
        == notes.set_if_absent("verdict", "different")
        == notes.read("verdict")
        == "same"
    )
    notes.post("empty", "")
    assert notes.read("empty") == ""
    notes.erase("verdict")
    assert notes.read("verdict") is None


@STORES
def test_what_another_erases_meanwhile_is_not_waited_for(make: Callable[[], dist.Store]) -> None:
    store = make()
    reader, writer, over = notes_in(store), notes_in(store.clone()), threading.Event()

    def write() -> None:
        while not over.is_set():
            writer.post("verdict", "same")
            writer.erase("verdict")

    thread = threading.Thread(target=write)
    thread.start()
    found = Counter[str | None]()
    times = 1000 if is_thorough() else 200
    try:
        while found["same"] < times or found[None] < times:
            found[reader.read("verdict")] += 1
        assert set(found) == {"same", None}
    finally:
        over.set()
        thread.join(60)
