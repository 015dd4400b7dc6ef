"""Notes exchanged by ranks of one start, in the rendezvous store of the default process group. [Note: starts]"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from ..base.wait_limits import keeps_program
from .start_name import name_of_this_start

PERIOD = 1.0  # seconds between two reads of the store by a rank
READS = 1024  # such reads per second, of all ranks together
_NOTHING = os.urandom(16).hex()  # a random value that is at no key
MOST = 2**62  # the largest value of a counter
KEPT = 16  # the last alarms, which stay readable; older ones are settled


class StoreGone(RuntimeError):
    """The process that served the store has ended."""


class StoreClient:
    """Notes in the store of the default process group, over a connection of our own; each call is one round trip.

    No call waits inside the store's client, whose lock would block the other thread. However, a call does not return if
    the server is stopped or unreachable; code that must not block checks `unanswered_for()` first. [Note: unresponsive
    store]

    Raises:
        StoreGone: from every call, once the store's process has ended.
    """

    def __init__(self, store: Any = None) -> None:
        """`store`: by default that of the default process group."""
        if store is None:
            assert dist.group.WORLD is not None
            store = dist.group.WORLD.get_group_store()
        self._given: Any = store
        self._connecting = threading.Lock()
        self._store: Any = None  # connected by the first request, since connecting needs the server
        self._connection: socket.socket | None = None
        # Of each thread's unanswered request: its time, and whether that thread keeps the program. [Note: waits]
        self._requests: dict[int, tuple[float, bool]] = {}

    def unanswered_for(self) -> float:
        """The seconds since the oldest unanswered request of any thread; 0 if there is none."""
        return max(0.0, time.monotonic() - min([began for began, _ in [*self._requests.values()]], default=math.inf))

    def waiting_since(self) -> float:
        """The time of the oldest unanswered request that keeps the program, by `time.monotonic()`; infinity if there is
        none. [Note: waits]"""
        return min([began for began, keeps in [*self._requests.values()] if keeps], default=math.inf)

    def post(self, key: str, text: str) -> None:
        """Write `text` at `key`."""
        with self._request() as store:
            store.set(key, text)

    def read(self, key: str) -> str | None:
        """The text at `key`; None if there is none."""
        # `get` would wait if another rank has erased the key; a compare-and-set that never succeeds does not.
        with self._request() as store:
            text = _decoded(store.compare_set(key, _NOTHING, _NOTHING))
        return None if text == _NOTHING else text

    def set_if_absent(self, key: str, text: str) -> str:
        """Write `text` at `key` unless there is a text; returns the text that is there now."""
        with self._request() as store:
            return _decoded(store.compare_set(key, "", text))

    def count(self, key: str, step: int = 1) -> int:
        """Add `step` to the number at `key` (initially 0) and return it; any other text counts as 0."""
        found = self.read(key)
        number = _number(found)
        if not step:
            return number
        if found is not None and str(number) != found:
            # The store drops the connection of a client that adds to a text that is not a number.
            self.post(key, "0")
        with self._request() as store:
            return int(store.add(key, step))

    def append(self, key: str, text: str) -> None:
        """Append `text` to the text at `key`."""
        with self._request() as store:
            store.append(key, text)

    def erase(self, *keys: str) -> None:
        """Delete `keys`."""
        for key in keys:
            with self._request() as store:
                store.delete_key(key)

    def raise_alarm(self, alarm: str) -> None:
        """Notify the watch of every rank of `alarm`."""
        number = self.count("alarms")
        self.post(f"alarm/{number}", alarm)
        if number > KEPT:
            self.erase(f"alarm/{number - KEPT}")

    def wait(self, ready: Callable[[], Any], seconds: float) -> Any:
        """Call `ready`, at growing intervals, until it returns a true value or `seconds` are over; its last value."""
        began = time.monotonic()
        while not (answer := ready()):
            waited = time.monotonic() - began
            if waited > seconds:
                break
            time.sleep(min(0.25, 0.001 + waited / 10))
        return answer

    def let_all_read(self, place: str, readers: int, seconds: float) -> None:
        """Give the others time to read the note at `place` before an error ends this process, and possibly the store
        with it. `readers`: the number of ranks that read it, including this one."""
        self.count(f"{place}/read")
        self.wait(lambda: self.count(f"{place}/read", 0) >= readers, seconds)

    @contextlib.contextmanager
    def _request(self) -> Iterator[Any]:
        """The store, for one request of this thread."""
        thread = threading.get_ident()
        self._requests[thread] = time.monotonic(), keeps_program()
        try:
            yield self._reachable()
        finally:
            del self._requests[thread]

    def _reachable(self) -> Any:
        if self._store is None:
            with self._connecting:
                if self._store is None:
                    self._connection = _line_to(self._given)
                    store = dist.PrefixStore("flatfsdp", self._given.clone())
                    self._store = dist.PrefixStore(name_of_this_start(store), store)
                    self._given = None  # its end is that of the process group
        if self._connection is not None and _is_closed(self._connection):
            raise StoreGone(f"the store of the process group{where_it_was()} is gone, and the process that served it")
        return self._store


class AlarmReader:
    """A rank's reader of alarms.

    Attributes:
        received: the number of alarms that it has read.
    """

    def __init__(self, store: StoreClient, period: Callable[[], float]) -> None:
        """`period`: the seconds between two reads."""
        self._store = store
        self._period = period
        self._gap_since = math.inf  # the time at which an alarm was first found counted but not written
        self.received = store.count("alarms", 0)

    def new(self) -> Iterator[str | None]:
        """The alarms raised since the last call; None for each one that was counted but never written."""
        sounded = self._store.count("alarms", 0)
        if not sounded - KEPT <= self.received <= sounded:  # earlier ones were erased, or other code set the count
            self.received = max(0, sounded - KEPT)
        while self.received < sounded:
            alarm = self._store.read(f"alarm/{self.received + 1}")
            if alarm is None:  # not written yet, or other code set the count
                self._gap_since = min(self._gap_since, time.monotonic())
                if time.monotonic() - self._gap_since < 2 * self._period():
                    return
            else:
                self._gap_since = math.inf
            self.received += 1
            yield alarm


def _decoded(stored: bytes) -> str:
    return stored.decode(errors="replace")


def _number(text: str | None) -> int:
    """The value of a counter with that text; 0 for any other text."""
    if text is None or len(text) > len(str(MOST)) or not text.isdecimal():
        return 0
    return min(int(text), MOST)


def where_it_was() -> str:
    """The address of the store in the launcher's environment variables, in words; "" if they have none."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return f" at {host}:{port}" if host and port else ""


def launcher_serves_it() -> bool:
    """Whether torchrun serves the store, so that it outlives all ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def server_in_words() -> str:
    """The process that serves the store, in words, as far as the environment shows."""
    if launcher_serves_it():
        return "the launcher, which serves it,"
    return "rank 0, which serves it unless a launcher does,"


def does_not_answer(seconds: float) -> str:
    """The message that the store has not answered for so many seconds."""
    return (
        f"The store of the process group{where_it_was()} has not answered for {seconds:.0f} s, and reports need it: "
        f"{server_in_words()} is stopped, or cannot be reached"
    )


def _line_to(store: Any) -> socket.socket | None:
    """An idle connection that shows whether the process that serves the store still runs.

    The store's own client would write pages to standard error when it detects the end, even at a program's normal exit.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return None
    with contextlib.suppress(OSError):
        line = socket.create_connection((store.host, store.port), timeout=5.0)
        line.setblocking(False)
        return line
    return None


def _is_closed(line: socket.socket) -> bool:
    try:
        return line.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
