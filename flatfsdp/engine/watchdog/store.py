"""Notes between ranks of one start, in the rendezvous store of the default process group. [Note: starts]"""

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

from .start_name import name_of_this_start

PERIOD = 1.0  # seconds between two readings of it by a rank
READS = 1024  # such readings per second, of all ranks together
_NOTHING = os.urandom(16).hex()  # stands nowhere, and nobody else can know it
MOST = 2**62  # that a counter can hold
KEPT = 16  # alarms that stay readable; one that many others followed was settled


class StoreGone(RuntimeError):
    """Nobody serves the store any more."""


class StoreClient:
    """Notes in the store of the default process group, over a connection of our own; each call is one round trip.

    No call waits inside the store's client: its lock would keep the other thread out. One whose server is stopped or
    cut off does not return, though; what may not wait for that looks at `unanswered_for()` first. [Note: unresponsive
    store]

    Raises:
        StoreGone: from every call, once the store's process has ended.
    """

    def __init__(self, store: Any = None) -> None:
        """`store`: that of the default process group without."""
        if store is None:
            assert dist.group.WORLD is not None
            store = dist.group.WORLD.get_group_store()
        self._given: Any = store
        self._connecting = threading.Lock()
        self._store: Any = None  # connected by the first request, as that needs the server, too
        self._connection: socket.socket | None = None
        self._requests: dict[int, float] = {}  # by thread: since when it has been waiting for an answer

    def unanswered_for(self) -> float:
        """For how many seconds the store has owed an answer to some thread; 0 where it owes none."""
        return max(0.0, time.monotonic() - min(list(self._requests.values()), default=math.inf))

    def waiting_since(self, thread: threading.Thread) -> float:
        """Since when this thread has been waiting for an answer, by `time.monotonic()`; infinity where it has not."""
        return self._requests.get(thread.ident or 0, math.inf)

    def post(self, key: str, text: str) -> None:
        """Write `text` at `key`."""
        with self._request() as store:
            store.set(key, text)

    def read(self, key: str) -> str | None:
        """What stands at `key`, None if nothing does."""
        # `get` would wait for what another rank erased since it was there; an exchange that never takes place does not.
        with self._request() as store:
            text = _decoded(store.compare_set(key, _NOTHING, _NOTHING))
        return None if text == _NOTHING else text

    def set_if_absent(self, key: str, text: str) -> str:
        """Write `text` at `key` unless something stands there; what stands there now."""
        with self._request() as store:
            return _decoded(store.compare_set(key, "", text))

    def count(self, key: str, step: int = 1) -> int:
        """Add `step` to the number at `key` (0 at first) and return it; what is no number there counts for 0."""
        found = self.read(key)
        number = _number(found)
        if not step:
            return number
        if found is not None and str(number) != found:
            # The store drops the connection of whoever adds to what is no number.
            self.post(key, "0")
        with self._request() as store:
            return int(store.add(key, step))

    def append(self, key: str, text: str) -> None:
        """Write `text` after what stands at `key`."""
        with self._request() as store:
            store.append(key, text)

    def erase(self, *keys: str) -> None:
        """Remove what stands at `keys`."""
        for key in keys:
            with self._request() as store:
                store.delete_key(key)

    def raise_alarm(self, alarm: str) -> None:
        """Let the watch of every rank consider `alarm`."""
        number = self.count("alarms")
        self.post(f"alarm/{number}", alarm)
        if number > KEPT:
            self.erase(f"alarm/{number - KEPT}")

    def wait(self, ready: Callable[[], Any], seconds: float) -> Any:
        """Call `ready` until it returns something true, ever more rarely; its last answer."""
        began = time.monotonic()
        while not (answer := ready()):
            waited = time.monotonic() - began
            if waited > seconds:
                break
            time.sleep(min(0.25, 0.001 + waited / 10))
        return answer

    def let_all_read(self, place: str, readers: int, seconds: float) -> None:
        """Give the others time to read what is at `place`, before an error ends this process and perhaps the store with
        it. `readers`: how many they are with this one."""
        self.count(f"{place}/read")
        self.wait(lambda: self.count(f"{place}/read", 0) >= readers, seconds)

    @contextlib.contextmanager
    def _request(self) -> Iterator[Any]:
        """The store, for one request of this thread's."""
        thread = threading.get_ident()
        self._requests[thread] = time.monotonic()
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
    """The alarms that one rank has yet to receive.

    Attributes:
        received: how many it has.
    """

    def __init__(self, store: StoreClient, period: Callable[[], float]) -> None:
        """`period`: the seconds between two looks."""
        self._store = store
        self._period = period
        self._gap_since = math.inf  # when an alarm was found counted, but not written
        self.received = store.count("alarms", 0)

    def new(self) -> Iterator[str | None]:
        """Those that came since; None for one that nobody wrote."""
        sounded = self._store.count("alarms", 0)
        if not sounded - KEPT <= self.received <= sounded:  # those before were erased; or somebody else counted
            self.received = max(0, sounded - KEPT)
        while self.received < sounded:
            alarm = self._store.read(f"alarm/{self.received + 1}")
            if alarm is None:  # counted, not written yet; or somebody else counted
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
    """The number that a counter holds; 0 for what no counter holds."""
    if text is None or len(text) > len(str(MOST)) or not text.isdecimal():
        return 0
    return min(int(text), MOST)


def where_it_was() -> str:
    """Where the environment of the launcher has the store, in words; "" where it has nothing."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return f" at {host}:{port}" if host and port else ""


def launcher_serves_it() -> bool:
    """Whether the store is torchrun's own, and outlives every rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def server_in_words() -> str:
    """The process behind the store, as far as the environment shows."""
    if launcher_serves_it():
        return "the launcher, which serves it,"
    return "rank 0, which serves it unless a launcher does,"


def does_not_answer(seconds: float) -> str:
    """That the store has not answered for so many seconds, in words."""
    return (
        f"The store of the process group{where_it_was()} has not answered for {seconds:.0f} s, and reports need it: "
        f"{server_in_words()} is stopped, or cannot be reached"
    )


def _line_to(store: Any) -> socket.socket | None:
    """A connection over which nothing is sent, which shows whether the process that serves the store still runs.

    The store's own client writes pages to standard error when it finds out; at the end of a program that is no news.
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
