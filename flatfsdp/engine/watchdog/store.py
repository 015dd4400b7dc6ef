"""Notes exchanged by ranks of one start, in the rendezvous store of the default process group.

[Note: starts] torchrun restarts ranks with the same store, after a failure or with more or fewer nodes. The store then
still has the notes of earlier ranks: ends that they reported, meetings that they held. No environment variable
distinguishes one start from the next on all nodes, and a rank may access the store alone, so a collective cannot
distribute a name. Times can: a launcher starts processes after those of the previous start have ended, and ranks access
the store after their process group exists, which requires all of them. The first rank to do so claims a name. A name
that was claimed before a process was started belongs to an earlier start, for all processes of the current one.

Ranks on one machine compare times since boot, ranks on several machines the time of day: clocks have to agree to about
a second, the time in which a process starts. A process that cannot determine its start (without Linux) uses the name in
the store.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from ..base.foreign_text import parse
from ..base.processes import start_of, this_system
from ..base.wait_limits import keeps_program

PERIOD = 1.0  # seconds between two reads of the store by a rank
READS = 1024  # such reads per second, of all ranks together
_NOTHING = os.urandom(16).hex()  # a random value that is at no key
MOST = 2**62  # the largest value of a counter
KEPT = 16  # the last alarms, which stay readable; older ones are settled
START = "start"  # the key of the claim of this start
TRIES = 8  # others may claim in the meantime, or write anything else there


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

    def __init__(self, store: Any = None, *, of_start: bool = True) -> None:
        """`store`: by default that of the default process group. `of_start`: the notes are those of one start, below
        its name; else also of processes that are started later. [Note: starts]"""
        if store is None:
            assert dist.group.WORLD is not None
            store = dist.group.WORLD.get_group_store()
        self._given: Any = store
        self._of_start = of_start
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

    def let_all_read(self, prefix: str, readers: int, seconds: float) -> None:
        """Give the others time to read the note below `prefix` before an error ends this process, and possibly the
        store with it. `readers`: the number of ranks that read it, including this one."""
        self.count(f"{prefix}/read")
        self.wait(lambda: self.count(f"{prefix}/read", 0) >= readers, seconds)

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
                    self._store = dist.PrefixStore(name_of_this_start(store), store) if self._of_start else store
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


# -- the name of this start --------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """A point in time, by two clocks.

    Attributes:
        system: as of `this_system`; since_boot: seconds on its clock. Both are empty where it has none.
        time: the time of day, in seconds.
    """

    system: str
    since_boot: float
    time: float

    @classmethod
    def now(cls) -> Moment:
        """The current time."""
        if not (system := this_system()) or not hasattr(time, "CLOCK_BOOTTIME"):
            return cls("", 0.0, time.time())
        return cls(system, time.clock_gettime(time.CLOCK_BOOTTIME), time.time())

    def is_before(self, other: Moment) -> bool:
        """Whether it is earlier than `other`."""
        if self.system and self.system == other.system:
            return self.since_boot < other.since_boot
        return self.time < other.time


class Claim(NamedTuple):
    """A claimed name of a start, and the time of the claim."""

    name: str
    at: Moment

    @classmethod
    def of(cls, text: str) -> Claim | None:
        """The claim that `text` has; None if it is not a claim."""
        match parse(text):
            case [str(name), [str(system), int() | float() as since_boot, int() | float() as seconds]]:
                return cls(name, Moment(system, since_boot, seconds))
        return None


def started_at() -> Moment | None:
    """The time at which this process was started; None if that cannot be determined."""
    now, ticks = Moment.now(), start_of(os.getpid())
    if not (now.system and ticks):
        return None
    since_boot = int(ticks) / os.sysconf("SC_CLK_TCK")
    return Moment(now.system, since_boot, now.time - (now.since_boot - since_boot))


def name_of_this_start(store: Any) -> str:
    """The name in `store` of the start that this process belongs to, which it claims if no rank has. One or two
    requests."""
    started, own = started_at(), json.dumps(Claim(uuid.uuid4().hex, Moment.now()))
    expected = ""
    for _ in range(TRIES):
        found = store.compare_set(START, expected, own).decode(errors="replace")
        claim = Claim.of(found)
        if claim is not None and (started is None or not claim.at.is_before(started)):
            return claim.name
        expected = found
    return "unnamed"  # the key is overwritten by other code, so no rank finds a claim
