"""Intervals at which the thread that attends to exchanges looks at them, without a thread and without waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from flatfsdp.engine.cpu import exchange
from flatfsdp.engine.cpu.exchange import LONG_AGO, PERIOD, SLOWEST
from tests.harness import inspect

pytestmark = pytest.mark.unit


class Exchange:
    """An exchange that was worked on `ago` seconds before, and its remaining work."""

    def __init__(self, ago: float, *, has_work: bool = True, moves: int = 0) -> None:
        self.has_work = has_work
        self.worked_at = time.monotonic() - ago
        self.moves, self.looked, self.trims = moves, 0, 0

    def progress(self) -> bool:
        self.looked += 1
        self.moves -= 1
        return self.moves >= 0

    def trim(self) -> bool:
        self.trims += 1
        self.worked_at = time.monotonic() if self.worked_at == LONG_AGO else self.worked_at
        return True


class Through(Exception):
    """The test has seen enough."""


class Pauses:
    """Replaces the event that hurries the thread, and records the time of each wait for it, `most` times."""

    def __init__(self, most: int, then: Callable[[int], Any]) -> None:
        self.of: list[float] = []
        self._most, self._then = most, then

    def wait(self, pause: float) -> bool:
        if len(self.of) == self._most:
            raise Through
        self.of.append(pause / PERIOD)
        return bool(self._then(len(self.of)))

    def clear(self) -> None:
        pass


class Wanted(threading.Event):
    """The event that wakes the thread: it is set, and the test ends once the thread sleeps again."""

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            raise Through
        return True


def pauses(*exchanges: Exchange, most: int = 7, then: Callable[[int], Any] = lambda count: False) -> list[float]:
    """Between looks at these, in periods; `then` is called in each, and its answer is whether the thread is hurried. Up
    to where the thread sleeps."""
    wanted, hurried = Wanted(), Pauses(most, then)
    wanted.set()
    with pytest.raises(Through):
        inspect.attendant_loop(exchanges, wanted, hurried)()
    return hurried.of


def test_looks_become_rare_where_others_do_the_work() -> None:
    worked = Exchange(ago=-60)  # again and again, while the test runs
    assert pauses(worked) == [1, 2, 4, SLOWEST, SLOWEST, SLOWEST, SLOWEST]
    assert worked.looked == 0


def test_what_is_left_alone_is_worked_on_each_period_as_long_as_it_goes_on() -> None:
    alone = Exchange(ago=60, moves=3)
    assert pauses(alone) == [1, 1, 1, 1, 2, 4, SLOWEST]
    assert alone.looked == 7


def test_who_is_hurried_looks_often_again() -> None:
    worked = Exchange(ago=-60)

    def hurry(count: int) -> bool:
        if count == 5:
            worked.worked_at = LONG_AGO
        if count == 7:
            worked.worked_at = time.monotonic() + 60
        return count == 5

    assert pauses(worked, most=9, then=hurry) == [1, 2, 4, SLOWEST, SLOWEST, 1, 1, 2, 4]


def test_it_sleeps_once_all_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "TRIM_AFTER", 1)
    busy, idle = Exchange(ago=-60), Exchange(ago=60, has_work=False)

    def end(count: int) -> None:
        if count == 2:
            busy.has_work = False  # and not alone for long
        if count == 3:
            busy.worked_at = time.monotonic() - 60

    assert pauses(busy, idle, most=9, then=end) == [1, 2, 4]
    assert busy.trims
