"""Which processes of a job are gone: connections whose only purpose is that the system closes them with the process.

[Note: neighbors] Every process is connected to those that follow it in the order of the job, `NEIGHBORS` of them, and
so to as many before it. The system closes a process's connections when it ends, however it ends: its neighbors notice
at once. A process that is stopped, or behind a network that is cut, closes nothing. So each sends a byte per `BEAT`,
and one that has sent nothing for longer than `lost_after` counts as gone, too; a machine that pauses, or a save that
takes long, does not. A process that was stopped itself has missed what the others sent, and counts from then on.

A process that learns of a loss sends `NEWS` to its neighbors, and each passes that on if the loss was new to it.

Connections stay for as long as both processes live, over all changes of the job; also those of a process that leaves
end ([Note: epochs]). A forked child closes its copies: otherwise it would keep them open after its
parent's end.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from ..errors import LostRankError

NEIGHBORS = 2  # after each process, and as many before it
BEAT = 1.0  # seconds
SECONDS = 10.0  # limit of a connection that is made
ALIVE, NEWS = b".", b"?"
_SECRET = 16
_HELLO = struct.Struct(f"!I{_SECRET}s")
_living: weakref.WeakSet[Neighbors] = weakref.WeakSet()


class Neighbors:
    """The connections of this process, and the thread that listens on them.

    Attributes:
        address: where this process accepts connections: host, port, secret; for the others.
    """

    def __init__(
        self,
        own: int,
        host: str,
        *,
        lost_after: float,
        gone: Callable[[int, str], None],
        news: Callable[[], None] = lambda: None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`own`: the number of this process in the job, which no other ever has. `gone` is called from the thread, or
        from `connect`, for each neighbor that is gone, with its number and words that follow "rank 3 "; `news` after
        others have called `notify`; `beat` once per `BEAT`."""
        self._own, self._lost_after, self._gone, self._news, self._at_beat = own, lost_after, gone, news, beat
        self._secret = secrets.token_bytes(_SECRET)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=256)
        self.address = (host, self._listener.getsockname()[1], self._secret.hex())
        self._numbers: dict[socket.socket, int | None] = {}  # None until its number has arrived
        self._last: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closed = threading.Event()
        _living.add(self)
        self._thread = threading.Thread(target=self._run, name="flatfsdp neighbors", daemon=True)
        self._thread.start()

    def connect(self, order: Sequence[int], addresses: Mapping[int, tuple[str, int, str]]) -> None:
        """Connect to the processes that follow this one in `order`, their ranks, unless it is connected to them.

        Raises:
            LostRankError: one cannot be reached. It is gone.
        """
        place = order.index(self._own)
        for each in range(1, min(NEIGHBORS, len(order) - 1) + 1):
            number = order[(place + each) % len(order)]
            if number in self.known:
                continue
            host, port, secret = addresses[number]
            try:
                made = socket.create_connection((host, port), timeout=SECONDS)
                made.sendall(_HELLO.pack(self._own, bytes.fromhex(secret)))
            except OSError as error:
                words = f"cannot be reached at {host}, port {port} ({error})"
                self._gone(number, words)
                raise LostRankError(f"rank {order.index(number)}, which {words}") from error
            self._add(made, number)

    def notify(self) -> None:
        """Send `NEWS` to the neighbors. May be called from any thread."""
        with self._lock:
            connections = [*self._numbers]
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.send(NEWS)

    @property
    def known(self) -> set[int]:
        """The numbers of the processes to which this one is connected."""
        with self._lock:
            return {number for number in self._numbers.values() if number is not None}

    def close(self) -> None:
        """End the thread and the connections. To the neighbors this process is gone."""
        self._closed.set()
        self._thread.join(SECONDS)
        for connection in [self._listener, *self._numbers]:
            connection.close()
        self._selector.close()

    def _add(self, connection: socket.socket, number: int | None) -> None:
        connection.setblocking(False)
        with self._lock:
            self._numbers[connection] = number
            self._last[connection] = time.monotonic()
            self._selector.register(connection, selectors.EVENT_READ)

    def _run(self) -> None:
        beat = time.monotonic()
        while not self._closed.is_set():
            before = time.monotonic()
            events = self._selector.select(max(0.01, beat - before))
            now = time.monotonic()
            if now - before > 5 * BEAT:  # this process was stopped
                with self._lock:
                    self._last = dict.fromkeys(self._last, now)
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(key.fileobj)  # type: ignore[arg-type]
            if now >= beat:
                beat = now + BEAT
                self._beat(now)
                self._at_beat()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            self._add(self._listener.accept()[0], None)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_HELLO.size)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(connection, f"has ended: its connection broke ({error})")
            return
        if not data:
            self._end(connection, "has ended: it has closed its connections")
            return
        self._last[connection] = time.monotonic()
        if self._numbers.get(connection) is None:
            # Sent at once, by a process that has just connected: it does not arrive in parts.
            if len(data) < _HELLO.size or not hmac.compare_digest(_HELLO.unpack(data)[1], self._secret):
                self._end(connection, "")
                return
            self._numbers[connection] = _HELLO.unpack(data)[0]
            return
        if NEWS in data:
            self._news()

    def _beat(self, now: float) -> None:
        with self._lock:
            connections = [*self._numbers]
        for connection in connections:
            with contextlib.suppress(OSError):  # it is full, or has ended, which `_receive` finds
                connection.send(ALIVE)
            if now - self._last[connection] > self._lost_after:
                self._end(connection, f"has sent nothing for {now - self._last[connection]:.0f} s")

    def _end(self, connection: socket.socket, words: str) -> None:
        with self._lock:
            number = self._numbers.pop(connection, None)
            self._last.pop(connection, None)
            self._selector.unregister(connection)
        if number is not None:
            self._gone(number, words)  # before a process that was only stopped can see the end of its connection
        connection.close()


def _forget_in_child() -> None:
    for each in _living:
        for connection in [each._listener, *each._numbers]:
            connection.close()


os.register_at_fork(after_in_child=_forget_in_child)
