"""The setup in which the ranks of a process group map each other's segments, or agree that they cannot.

[Note: handshakes] Each rank listens on a socket without a file (with a random abstract name), and sends the name, and a
secret, to the ranks of the group by a collective. Each rank connects to all ranks before it, which succeeds before they
accept; a second collective shows whether all ranks could. Each side of a connection sends the descriptors of its
segments after it has verified that the other side is a process of the same user and knows the secret. The connections
stay open: when a process ends, its side closes, and its peers notice that.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..base import _torch
from ..base.wait_limits import blocked
from .segments import MemorySegment, create, is_sealed

NAME, SECRET, REASON = 16, 32, 160  # bytes
SECONDS = 20.0  # limit of the wait for another rank's connection
BACKLOG = 4096  # connections, also of foreign processes, that may wait to be accepted
NOBODY = "no connection from ranks"
OR_CONTAINERS = ", or in containers that do not share a network namespace, or some of which may not read /proc"
_HANDSHAKE = struct.Struct(f"=I{SECRET}s")


class Peer:
    """Another rank of the group.

    Attributes:
        rank: its rank in the group. segments: its segments, mapped.
    """

    def __init__(self, rank: int, connection: socket.socket, segments: list[MemorySegment]) -> None:
        self.rank = rank
        self.segments = segments
        self._connection = connection

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended, or has closed the connection."""
        look = select.poll()  # `select` does not support descriptors from 1,024 on
        look.register(self._connection, select.POLLIN)
        return bool(look.poll(0))  # no data are ever sent, so the event is the end

    def close(self) -> None:
        """Close the connection. The peer regards this rank as ended from now on."""
        self._connection.close()


def obstacle() -> str:
    """Why this process cannot share memory with others; "" if it can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return f"it needs Linux, but this is {sys.platform}"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"it needs an x86-64 processor, but this is {platform.machine()}"
    try:
        os.close(create(4096))
    except OSError as error:
        return f"this system does not provide shared memory: {error}"
    return ""


def connect_peers(
    process_group: Any, descriptors: Sequence[int], sizes: Sequence[int], obstacle: str
) -> tuple[list[Peer], str]:
    """The peers of this rank, with their mapped segments; or no peers, and the reason.

    Collective over the group. `descriptors`: this rank's segments; `sizes`: the sizes of every rank's segments.
    `obstacle`: the reason why this rank cannot; then no rank does. All ranks return the same reason.
    """
    rank = process_group.rank()
    listener, name, secret = None, b"", secrets.token_bytes(SECRET)
    if not obstacle:
        try:
            listener, name = _listen()
        except OSError as error:
            obstacle = f"cannot open a local socket: {error}"
    try:
        answers = _all_gather(process_group, name.ljust(NAME, b"\0") + secret + _host(), obstacle)
        if why := _first_reason(answers):
            return [], why
        if len({payload[NAME + SECRET :] for payload, _ in answers}) > 1:
            return [], f"the ranks are on several hosts{OR_CONTAINERS}"
        assert listener is not None
        names = [payload[:NAME] for payload, _ in answers]
        keys = [payload[NAME : NAME + SECRET] for payload, _ in answers]
        found: dict[int, socket.socket] = {}
        peers: list[Peer] = []
        if not (why := _agreed(process_group, lambda: _connect(rank, names, keys, found))):
            awaited = set(range(rank + 1, len(names)))

            def accept_all() -> None:
                try:
                    _accept(listener, keys[rank], awaited, found)
                    peers.extend(_exchanged(found, descriptors, sizes))
                except BaseException:
                    _close(listener, *found.values())  # otherwise peers would wait in vain
                    raise

            why = _agreed(process_group, accept_all)
        if why:
            _close(*found.values())
            return [], why
        return peers, ""
    finally:
        if listener is not None:
            listener.close()


def _listen() -> tuple[socket.socket, bytes]:
    name = secrets.token_hex(NAME // 2).encode()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(b"\0" + name)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener, name


def _host() -> bytes:
    """16 bytes that identify this boot of the host and the network namespace of its abstract sockets."""
    try:
        system = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        system, network = platform.node(), 0
    return hashlib.blake2b(f"{system} {network}".encode(), digest_size=16).digest()


def _all_gather(process_group: Any, payload: bytes, reason: str) -> list[tuple[bytes, str]]:
    """Every rank's `payload`, which has the same length on all, and the reason why it cannot. Collective."""
    own = payload + reason.encode()[:REASON].ljust(REASON, b"\0")
    sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    received = torch.empty(process_group.size() * len(own), dtype=torch.uint8)
    with blocked():
        _torch.FlatCollectives(process_group, beside=False).gather(received, sent).wait()
    messages = [bytes(each.tolist()) for each in received.view(process_group.size(), -1)]
    return [(each[: len(payload)], each[len(payload) :].rstrip(b"\0").decode(errors="replace")) for each in messages]


def _first_reason(answers: list[tuple[bytes, str]]) -> str:
    """The first reason of a rank; reasons of ranks that only waited for others are the last choice."""
    reasons = [(NOBODY in why, f"rank {rank} of the group: {why}") for rank, (_, why) in enumerate(answers) if why]
    return min(reasons, default=(False, ""), key=lambda each: each[0])[1]


def _agreed(process_group: Any, attempt: Callable[[], None]) -> str:
    """The reason why `attempt` failed on some rank; "" if it succeeded on all. Collective."""
    reason = ""
    try:
        attempt()
    except (OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
    return _first_reason(_all_gather(process_group, b"", reason))


def _connect(rank: int, names: list[bytes], secrets_: list[bytes], found: dict[int, socket.socket]) -> None:
    """Connect to the ranks before this one, which need not have accepted yet, and add the connections to `found`."""
    for other in range(rank):
        found[other] = connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(SECONDS)
        connection.connect(b"\0" + names[other])
        if not _is_ours(connection):
            raise ValueError("a process of another user is listening on the name of this socket")
        connection.sendall(_HANDSHAKE.pack(rank, secrets_[other]))


def _exchanged(found: dict[int, socket.socket], descriptors: Sequence[int], sizes: Sequence[int]) -> list[Peer]:
    """Send `descriptors` over each connection; returns the peers, with the segments received from them."""
    for connection in found.values():
        socket.send_fds(connection, [b"\0"], list(descriptors))
    return [Peer(other, found[other], _receive(other, found[other], sizes)) for other in sorted(found)]


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        each.close()


def _accept(listener: socket.socket, secret: bytes, awaited: set[int], found: dict[int, socket.socket]) -> None:
    """Accept the `awaited` ranks, which know the `secret`, and add their connections to `found`. Foreign connections
    cannot delay them, regardless of the data that they send or withhold."""
    deadline = time.monotonic() + SECONDS
    unfinished: dict[socket.socket, bytes] = {}
    try:
        while not awaited <= found.keys():
            ready = select.poll()
            for each in (listener, *unfinished):
                ready.register(each, select.POLLIN)
            if not (events := ready.poll(max(0.0, deadline - time.monotonic()) * 1e3)):
                raise TimeoutError(f"{NOBODY} {sorted(awaited - found.keys())} within {SECONDS:g} s")
            descriptors = {descriptor for descriptor, _ in events}
            for each in [each for each in unfinished if each.fileno() in descriptors]:
                handshake = unfinished.pop(each)
                more = _received(each, _HANDSHAKE.size - len(handshake))
                handshake += more
                if more and len(handshake) < _HANDSHAKE.size:
                    unfinished[each] = handshake
                elif (other := _rank_from(handshake, secret)) in awaited - found.keys():
                    found[other] = each
                else:
                    each.close()
            if listener.fileno() in descriptors:
                connection, _ = listener.accept()
                connection.settimeout(SECONDS)
                if _is_ours(connection):
                    unfinished[connection] = b""
                else:
                    connection.close()
    finally:
        for each in unfinished:
            each.close()


def _rank_from(handshake: bytes, secret: bytes) -> int:
    """The rank that sent this `handshake`; -1 if it does not have the `secret`."""
    if len(handshake) < _HANDSHAKE.size:
        return -1
    rank, known = _HANDSHAKE.unpack(handshake)
    return int(rank) if hmac.compare_digest(known, secret) else -1


def _received(connection: socket.socket, size: int) -> bytes:
    try:
        return connection.recv(size)
    except OSError:  # the other side closed the connection
        return b""


def _receive(other: int, connection: socket.socket, sizes: Sequence[int]) -> list[MemorySegment]:
    """The segments received from another rank, mapped."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, len(sizes))
    try:
        if len(descriptors) != len(sizes) or not all(map(is_sealed, descriptors, sizes)):
            raise ValueError(f"the memory shared by rank {other} of the group is not sealed at the agreed sizes")
        return [MemorySegment(*each) for each in zip(descriptors, sizes, strict=True)]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end is of the same user."""
    credentials = struct.Struct("3i")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    _, user, _ = credentials.unpack(raw)
    return bool(user == os.getuid())
