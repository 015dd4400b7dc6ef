"""Which waits keep the program: of the main thread, of threads that run a backward, and of the device."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flatfsdp
from flatfsdp.engine.base import wait_limits as waits
from flatfsdp.engine.watchdog.local_waits import LocalWaits
from flatfsdp.engine.watchdog.store import StoreClient
from tests.watchdog.test_watchdog import World, texts  # noqa: F401 - a fixture

pytestmark = pytest.mark.unit


@pytest.fixture
def local() -> Iterator[LocalWaits]:
    flatfsdp.set_collective_timeout(report_after=0.01)
    yield LocalWaits(StoreClient({}), time_limit=600.0, period=lambda: 1.0)
    flatfsdp.set_collective_timeout()


def in_a_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def in_a_backward(work: Callable[[], Any]) -> None:
    """Run `work` in a hook of a backward, which runs in this thread as on autograd's own thread for a device."""
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda grad: work())
    leaf.sum().backward()


def waiting(local: LocalWaits, found: list[Any]) -> Callable[[], None]:
    def wait() -> None:
        around = local.announce([0, 1], "waits for the notes of the others", ends_by_notes=True)
        time.sleep(0.02)
        found.append((local.waited()[0], local.suspicion()))
        local.end(around)

    return wait


def test_a_backward_in_a_thread_that_the_main_thread_joins_is_seen(local: LocalWaits) -> None:
    found: list[Any] = []
    in_a_thread(lambda: in_a_backward(waiting(local, found)))
    ((since, suspicion),) = found
    assert math.isfinite(since) and suspicion == "report"
    assert math.isinf(local.waited()[0]), "it is over"


def test_a_thread_in_the_background_keeps_nobody(local: LocalWaits) -> None:
    found: list[Any] = []
    in_a_thread(waiting(local, found))
    assert found == [(math.inf, None)]


@pytest.mark.parametrize("backward", [True, False])
def test_a_request_to_the_store_is_a_wait_of_such_a_thread(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []
    store = StoreClient({})

    class Answering:
        def set(self, key: str, text: str) -> None:
            found.append(store.waiting_since())
            assert store.unanswered_for() > 0

    monkeypatch.setattr(StoreClient, "_reachable", lambda self: Answering())
    post = lambda: store.post("key", "text")  # noqa: E731
    in_a_thread(lambda: in_a_backward(post) if backward else post())
    assert math.isfinite(found[0]) is backward
    assert math.isinf(store.waiting_since())


def test_the_programs_own_wait_in_a_hook_is_one_that_keeps_it() -> None:
    found: list[int] = []

    def wait() -> None:
        with waits.blocked(theirs=True):
            found.append(len(waits.standing()))

    in_a_thread(lambda: in_a_backward(wait))
    in_a_thread(wait)
    assert found == [1, 0]


class Event:
    """The event after a collective on a device."""

    passed = False

    def query(self) -> bool:
        return self.passed


def test_a_collective_that_the_device_never_finishes_is_reported(
    texts: list[str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event = Event()
    monkeypatch.setitem(waits.issued, "reduce", (event, time.monotonic() - 60.0))
    world = World(2)
    for _ in range(3):
        world.look()
    assert len(texts) == 2 and all("blocked for 60 s" in each for each in texts), texts
    event.passed = True
    world.look()
    assert len(texts) == 4 and all("resumed after 60 s" in each for each in texts[2:]), texts
    assert not waits.issued, "an event that has passed is not asked again"


def test_it_is_an_error_after_raise_after(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setitem(waits.issued, "unshard", (Event(), time.monotonic() - 60.0))
    flatfsdp.set_collective_timeout(report_after=0.01, raise_after=30.0)
    world = World(2)
    for _ in range(3):
        world.look()
    assert all(isinstance(model.error, flatfsdp.errors.WaitError) for model in world.models)


def test_an_event_is_asked_only_when_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unasked:
        def query(self) -> bool:
            raise AssertionError("a capture of a graph would end here")

    monkeypatch.setitem(waits.issued, "unshard", (Unasked(), time.monotonic()))
    assert math.isinf(waits.blocked_since())


def test_an_operation_that_failed_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(waits.issued, "unshard", (Failed(), 0.0))
    assert math.isinf(waits.blocked_since())
