"""Words between ranks outside of collectives: notes in the rendezvous store, and the thread that turns a wait into a
sentence.

[Note: watch] A rank that waits in a collective for peers that went elsewhere cannot be told so by a collective. What is
left is the store of the default process group. A rank that does something unexpected leaves a note there and sounds an
*alarm*. On every rank one daemon thread, while that rank is inside an iteration, reads the number of alarms once per
`PERIOD`; nothing else is read as long as all is well. The thread runs from a model's first forward until its models are
gone.

Before the first iteration ranks wait for each other, too: where communicators are made and models compared. A rank that
has waited there for a while leaves a note of where; two ranks that wait for each other in different places never meet.

A blocked wait cannot be called off: gloo's `abort` blocks as well, and an aborted NCCL kernel lets the host go on with
garbage. So the thread prints the sentence and leaves the main thread `GRACE` seconds to come back by itself, which it
does when the ranks that parted close their connections; only then it ends the process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

PERIOD = 1.0  # seconds between two readings of the store
GRACE = 4.0  # seconds that a blocked main thread gets to come back before its process is ended
KEPT = 16  # alarms that stay readable; one that many others followed was settled
PATIENCE = 1800.0  # seconds to wait for the notes of the others, which may be late for good reasons: torch's own bound


class Board:
    """Notes in the store of the default process group, over a connection of our own; each call is one round trip.

    No call waits inside the store's client: its lock would keep the other thread out.
    """

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        store: Any = dist.group.WORLD.get_group_store()
        self._store: Any = dist.PrefixStore("flatfsdp", store.clone())

    def post(self, key: str, text: str) -> None:
        """Write `text` at `key`."""
        self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """What stands at `key`, None if nothing does."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def first(self, key: str, text: str) -> str:
        """Write `text` at `key` unless something stands there; what stands there now."""
        return str(self._store.compare_set(key, "", text).decode())

    def count(self, key: str, step: int = 1) -> int:
        """Add `step` to the number at `key` (0 at first) and return it."""
        return int(self._store.add(key, step))

    def erase(self, *keys: str) -> None:
        """Remove what stands at `keys`."""
        for key in keys:
            self._store.delete_key(key)

    def wait(self, ready: Callable[[], Any], seconds: float) -> Any:
        """Ask `ready` until it answers something true, ever more rarely; its last answer."""
        began = time.monotonic()
        while not (answer := ready()):
            waited = time.monotonic() - began
            if waited > seconds:
                break
            time.sleep(min(0.25, 0.001 + waited / 10))
        return answer


class Watched(Protocol):
    """What the thread looks after, held weakly: the agreement of one model."""

    @property
    def busy(self) -> bool:
        """Whether this rank is inside an iteration, where it may be waiting for others."""

    def consider(self, alarm: str) -> bool:
        """Judge an alarm, by the reading of the store at most; True when it is of no interest any more."""


@dataclass(frozen=True)
class Wait:
    """Where this rank waits for `ranks` before a model's first iteration."""

    ranks: tuple[int, ...]
    what: str
    since: float

    @property
    def note(self) -> str:
        """For the others: the same text where they wait for the same."""
        return json.dumps([self.ranks, self.what])


class Watch:
    """The thread of one default process group, and who is watched."""

    def __init__(self) -> None:
        self.board = Board()
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._heard = 0
        self._open: list[str] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._wait: Wait | None = None
        self._told: set[str] = set()
        self._suspects: dict[int, str] = {}  # who waited for this rank elsewhere at the last look
        atexit.register(_close, weakref.ref(self))

    def add(self, watched: Watched) -> None:
        """Look after `watched` until it is gone; starts the thread if none runs."""
        with self._lock:
            self._watched.add(watched)
            weakref.finalize(watched, self._wake.set).atexit = False
            self._start()

    @contextlib.contextmanager
    def waiting(self, ranks: Sequence[int], what: str) -> Iterator[None]:
        """The enclosed code waits until all `ranks` are at the same place; `what` says which one."""
        with self._lock:
            self._wait = Wait(tuple(ranks), what, time.monotonic())
            self._start()
        try:
            yield
        finally:
            wait, self._wait = self._wait, None
            self._suspects = {}
            if wait.note in self._told:
                self._told.discard(wait.note)
                self.board.erase(f"waits/{dist.get_rank()}")
            self._wake.set()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flatfsdp watch", daemon=True)
            self._thread.start()

    def sound(self, alarm: str) -> None:
        """Make the thread of every rank consider `alarm`."""
        number = self.board.count("alarms")
        self.board.post(f"alarm/{number}", alarm)
        if number > KEPT:
            self.board.erase(f"alarm/{number - KEPT}")

    def close(self) -> None:
        """Stop the thread: at the end of the interpreter it would die in the middle of a call."""
        self._closed = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2 * PERIOD)

    def _run(self) -> None:
        try:
            while self._wanted():
                self._wake.wait(PERIOD)
                self._wake.clear()
                if not self._closed:
                    self._look()
        except RuntimeError:  # the store is gone, and with it whatever it could tell
            self._thread = None

    def _wanted(self) -> bool:
        with self._lock:
            if (self._watched or self._wait is not None) and not self._closed:
                return True
            self._thread = None
            return False

    def _look(self) -> None:
        wait = self._wait
        if wait is not None and time.monotonic() - wait.since > PERIOD:
            self._look_for(wait)
        watched = list(self._watched)
        if not any(each.busy for each in watched):
            return
        sounded = self.board.count("alarms", 0)
        while self._heard < sounded:
            alarm = self.board.read(f"alarm/{self._heard + 1}")
            if alarm is None and self._heard + KEPT >= sounded:  # counted, not written yet
                break
            self._heard += 1
            if alarm is not None:
                self._open.append(alarm)
        self._open = [alarm for alarm in self._open if not all(each.consider(alarm) for each in watched)]

    def _look_for(self, wait: Wait) -> None:
        rank = dist.get_rank()
        if wait.note not in self._told:
            self._told.add(wait.note)
            self.board.post(f"waits/{rank}", wait.note)
        missing = []
        suspects = {}
        for other in wait.ranks:
            note = self.board.read(f"waits/{other}") if other != rank else wait.note
            if note != wait.note:
                missing.append(other)
                if note is not None and rank in json.loads(note)[0]:
                    suspects[other] = note
        # Twice the same: neither has moved since the last look.
        stuck = {other: note for other, note in suspects.items() if self._suspects.get(other) == note}
        self._suspects = suspects
        if stuck and self._wait is wait:
            places = {rank: wait.note} | stuck
            told = "; ".join(f"rank {each} {json.loads(places[each])[1]}" for each in sorted(places))
            speak(
                f"[flatfsdp, rank {rank}] AgreementError: ranks wait for each other in different places: {told}. Wrap "
                "the same module over the same process group or mesh, with the same strategy, on every rank"
            )
            time.sleep(3 * PERIOD)  # the others must find this rank's note, and the store that may be here
            end_process_unless(lambda: self._wait is not wait)
        elif missing and time.monotonic() - wait.since > 10 * PERIOD and wait.what not in self._told:
            self._told.add(wait.what)
            names = ", ".join(map(str, missing))
            speak(f"[flatfsdp, rank {rank}] still waiting for rank {names}: this rank {wait.what}, and they do not")


def _close(watch: weakref.ref[Watch]) -> None:
    found = watch()
    if found is not None:
        found.close()


def is_lost_connection(error: BaseException) -> bool:
    """Whether a backend lost its peers; gloo says so with a plain `RuntimeError`."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def speak(sentence: str) -> None:
    """Print `sentence` at once, whatever the main thread is doing."""
    with contextlib.suppress(OSError, ValueError):
        print(sentence, file=sys.stderr, flush=True)


def end_process_unless(come_back: Callable[[], bool]) -> None:
    """End this process with status 1 if `come_back()` does not turn true within `GRACE` seconds (on the thread)."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        if come_back():
            return
        time.sleep(0.05)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(1)


_watches: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()


def current_watch() -> Watch:
    """The watch of the default process group."""
    world = dist.group.WORLD
    found = _watches.get(world)
    if found is None:
        found = _watches[world] = Watch()
    return found


def expecting(ranks: Sequence[int], what: str) -> contextlib.AbstractContextManager[None]:
    """The enclosed code waits for `ranks`: say so in words if they are waiting elsewhere.

    `what` completes "rank 0 ...". Process groups that move nothing wait for nobody.
    """
    if len(ranks) == 1 or "fake" in str(dist.get_backend_config()):
        return contextlib.nullcontext()
    return current_watch().waiting(ranks, what)
