"""Ranks that were started together find one name in a store, and none that an earlier start left there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
import torch.distributed as dist

from flatfsdp.engine.watchdog import store as stores
from flatfsdp.engine.watchdog.status_report import ExitRecord
from flatfsdp.engine.watchdog.store import START, TRIES, Claim, Moment, StoreClient, name_of_this_start, started_at

pytestmark = pytest.mark.unit


def tcp() -> dist.Store:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


STORES = pytest.mark.parametrize("make", [dist.HashStore, tcp])
linux = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")


def claim(store: dist.Store, at: Moment) -> None:
    store.set(START, json.dumps(Claim("before", at)))


@linux
@STORES
def test_ranks_of_one_start_have_one_name(make: Callable[[], dist.Store]) -> None:
    store = make()
    name = name_of_this_start(store)
    assert name == name_of_this_start(store.clone()) != name_of_this_start(make())


@linux
@STORES
def test_a_name_from_before_this_process_was_started_is_another_starts(make: Callable[[], dist.Store]) -> None:
    store, began = make(), started_at()
    assert began is not None
    claim(store, began._replace(since_boot=began.since_boot - 0.1))
    name = name_of_this_start(store)
    assert name == name_of_this_start(store) != "before"
    claim(store, began._replace(since_boot=began.since_boot + 0.1))
    assert name_of_this_start(store) == "before"


@linux
def test_ranks_of_other_machines_go_by_the_time_of_day() -> None:
    store, began = dist.HashStore(), started_at()
    assert began is not None
    claim(store, Moment("another", 0.0, began.time + 1))
    assert name_of_this_start(store) == "before"
    claim(store, Moment("another", 1e9, began.time - 1))
    assert name_of_this_start(store) != "before"


def test_a_process_that_cannot_find_out_when_it_was_started_takes_the_name_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stores, "this_system", lambda: "")
    store = dist.HashStore()
    claim(store, Moment("", 0.0, 0.0))
    assert started_at() is None
    assert name_of_this_start(store) == "before"


@STORES
@pytest.mark.parametrize("garbage", ["", "7", "[]", '["a", 1]', '["a", ["b", "c", 1]]', "\0", "[" * 5000])
def test_garbage_is_no_name(make: Callable[[], dist.Store], garbage: str) -> None:
    store = make()
    store.set(START, garbage)
    assert name_of_this_start(store) == name_of_this_start(store)


def test_whoever_writes_garbage_all_the_time_is_given_up_on() -> None:
    class Stubborn:
        asked = 0

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            self.asked += 1
            return f"garbage {self.asked}".encode()

    store = Stubborn()
    assert name_of_this_start(store) == "unnamed"
    assert store.asked == TRIES


@linux
@STORES
def test_notes_of_an_earlier_start_are_not_read(
    make: Callable[[], dist.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, began = make(), started_at()
    assert began is not None
    # It was started earlier, and has ended.
    with monkeypatch.context() as earlier:
        earlier.setattr(Moment, "now", classmethod(lambda cls: began._replace(since_boot=began.since_boot - 1)))
        earlier.setattr(stores, "started_at", lambda: began._replace(since_boot=began.since_boot - 2))
        before = StoreClient(store)
        ExitRecord(1, "was killed").publish(before, alarm=True)
    assert ExitRecord.read_all(before).keys() == {1}
    one, other = StoreClient(store), StoreClient(store)
    assert ExitRecord.read_all(one) == {}
    assert one.count("alarms", 0) == 0
    one.post("verdict", "same")
    assert other.read("verdict") == "same"
    assert before.read("verdict") is None
