"""The connections between the processes of a job, and how they are broken from outside.

[Note: severing] A rank that waits in gloo for one that waits elsewhere does not notice that a third rank is lost: its
own connections are whole, its wait has no other end than a time limit, and gloo's `abort` blocks as well. So the watch
of a rank shuts its connections down (`shutdown(2)`), under the library that uses them: each wait on them ends at once
with an error, on both sides.

Only connections between ranks are: each rank publishes the two addresses of all its connections. One whose addresses
another rank has published the other way round is a connection to that rank. That to the store is between a rank and
another process, or is left out by its port.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from ..engine.watchdog.watchdog import is_lost_connection

Address = tuple[str, int]


class Connection(NamedTuple):
    """One side's view of a connection."""

    own: Address
    other: Address

    @classmethod
    def of(cls, found: object) -> Connection | None:
        """The connection that was decoded to `found`; None if it is not one."""
        match found:
            case [[str(host), int(port)], [str(to), int(to_port)]]:
                return cls((host, port), (to, to_port))
        return None

    @property
    def reversed(self) -> Connection:
        """The other side's view."""
        return Connection(self.other, self.own)


def open_connections() -> dict[Connection, int]:
    """The TCP connections of this process, with their file descriptors."""
    found = {}
    for descriptor, each in _sockets():
        with contextlib.suppress(OSError):  # listens, or is not connected
            found[_seen_from(each)] = descriptor
    return found


def listening_ports() -> frozenset[int]:
    """The TCP ports on which this process accepts connections."""
    accepting = (each for _, each in _sockets() if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return frozenset(each.getsockname()[1] for each in accepting)


def sever(published: Iterable[object], *, keep: Collection[int] = ()) -> int:
    """Shut down all connections of this process to other ranks, given what each of these has published; returns how
    many.

    `keep`: ports whose connections stay, as the store's.
    """
    found = [Connection.of(each) for connections in published if isinstance(connections, list) for each in connections]
    theirs = {each.reversed for each in found if each is not None}
    return shut({each for each in theirs if not {each.own[1], each.other[1]} & {*keep}})


def shut(those: Collection[Connection]) -> int:
    """Shut down these connections, as far as they are open; returns how many."""
    count = 0
    for connection, descriptor in open_connections().items() if those else ():
        if connection in those:
            with _socket(descriptor) as each, contextlib.suppress(OSError):
                # Another thread may have closed it since, and opened another one with the same descriptor.
                if each is not None and _seen_from(each) == connection:
                    each.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def is_broken(error: BaseException, *kinds: type[BaseException]) -> bool:
    """Whether `error` or what caused it, as that of a save, is a lost connection, or of one of `kinds`."""
    if isinstance(error, kinds) or is_lost_connection(error):
        return True
    return error.__cause__ is not None and is_broken(error.__cause__, *kinds)


def _seen_from(each: socket.socket) -> Connection:
    return Connection(each.getsockname()[:2], each.getpeername()[:2])


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """The TCP sockets of this process, each until the next one is asked for, with their file descriptors."""
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:  # none is left to list them by
        return
    for descriptor in map(int, descriptors):
        with _socket(descriptor) as each:
            if each is not None:
                yield descriptor, each


@contextlib.contextmanager
def _socket(descriptor: int) -> Iterator[socket.socket | None]:
    """A TCP socket with that file descriptor, by a duplicate of it; None if it is something else, or just closed."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        yield None
        return
    try:
        made = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        yield None
        return
    with made:
        yield made if made.family in (socket.AF_INET, socket.AF_INET6) and made.type == socket.SOCK_STREAM else None
