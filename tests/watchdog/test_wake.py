"""Waking of a thread."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from flatfsdp.engine.watchdog.watchdog import Wake

pytestmark = pytest.mark.unit


class Node:
    """Part of a reference cycle."""

    def __init__(self) -> None:
        self.itself = self


def test_it_ends_the_running_wait_or_the_next() -> None:
    wake = Wake()
    began = time.monotonic()
    threading.Timer(0.01, wake.set).start()
    wake.wait(60.0)
    wake.set()
    wake.set()
    wake.wait(60.0)
    assert time.monotonic() - began < 30.0
    wake.wait(0.001)


@pytest.mark.parametrize("call", [Wake.set, lambda wake: wake.wait(0.01)])
def test_finalizers_may_run_inside_of_it(call: Callable[[Wake], None]) -> None:
    """The garbage collector runs them in any thread, at any time; where they set an event, that waited for itself."""
    wake, collected = Wake(), []

    def collect(*event: object) -> None:
        node = Node()
        weakref.finalize(node, wake.set).atexit = False
        del node
        collected.append(gc.collect(0))  # the youngest objects: all of them, at each of the calls, took 10 s

    def work() -> None:
        sys.setprofile(collect)
        call(wake)
        sys.setprofile(None)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive()
    assert any(collected)
