"""How the ranks of a process group come to map each other's segments, or agree that they cannot.

[Note: handshakes] Each rank listens on a socket without a file (an abstract name, which is random), and gives its
name, and a secret, to the ranks of the group by a collective of the group. Ranks connect in pairs, each to those before
it, which takes nobody who accepts; a second collective shows whether all could. Each side of a connection sends the
descriptors of its segments, once it has seen that the other is a process of the same user and knows the secret. The
connections stay: a process that ends closes its side, which is how its peers notice.
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

from ...base import _torch
from ...base.wait_limits import blocked
from .segments import MemorySegment, create, is_sealed

NAME, SECRET, REASON = 16, 32, 160  # bytes
SECONDS = 20.0  # that a rank waits for another one's connection
BACKLOG = 4096  # connections, strangers' too, that may wait to be accepted
NOBODY = "nobody came of ranks"
_HANDSHAKE = struct.Struct(f"=I{SECRET}s")


class Peer:
    """Another rank of the group.

    Attributes:
        rank: in the group. segments: its own, mapped.
    """

    def __init__(self, rank: int, connection: socket.socket, segments: list[MemorySegment]) -> None:
        self.rank = rank
        self.segments = segments
        self._connection = connection

    @property
    def has_ended(self) -> bool:
        """Whether its process has, or has let go of the group."""
        look = select.poll()  # `select` knows no descriptors from 1,024 on
        look.register(self._connection, select.POLLIN)
        return bool(look.poll(0))  # nothing is ever sent: it is the end

    def close(self) -> None:
        """Let go of it. It takes this rank for ended from now on."""
        self._connection.close()


def obstacle() -> str:
    """Why this process cannot share memory with others; "" if it can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return f"it needs Linux, this is {sys.platform}"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"it needs an x86-64 processor, this is {platform.machine()}"
    try:
        os.close(create(4096))
    except OSError as error:
        return f"this system gives no memory to share: {error}"
    return ""


def connect_peers(
    process_group: Any, descriptors: Sequence[int], sizes: Sequence[int], obstacle: str
) -> tuple[list[Peer], str]:
    """The peers of this rank, each with segments of these `sizes`, as are those whose `descriptors` are given here; or
    none, and why.

    Collective over the group. `obstacle`: why this rank cannot; then no rank does. All ranks get the same answer.
    """
    rank = process_group.rank()
    listener, name, secret = None, b"", secrets.token_bytes(SECRET)
    if not obstacle:
        try:
            listener, name = _listen()
        except OSError as error:
            obstacle = f"no local socket: {error}"
    try:
        answers = _all_gather(process_group, name.ljust(NAME, b"\0") + secret + _host(), obstacle)
        if why := _first_reason(answers):
            return [], why
        if len({payload[NAME + SECRET :] for payload, _ in answers}) > 1:
            return [], "the ranks are on several hosts"
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
                    _close(listener, *found.values())  # or others would wait for what will not come
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
    """16 bytes that are this system's since it was started, and the network's whose sockets it sees."""
    try:
        system = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        system, network = platform.node(), 0
    return hashlib.blake2b(f"{system} {network}".encode(), digest_size=16).digest()


def _all_gather(process_group: Any, payload: bytes, reason: str) -> list[tuple[bytes, str]]:
    """Every rank's `payload`, of one length on all of them, and its reason against. Collective."""
    own = payload + reason.encode()[:REASON].ljust(REASON, b"\0")
    sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    received = torch.empty(process_group.size() * len(own), dtype=torch.uint8)
    with blocked():
        _torch.FlatCollectives(process_group, beside=False).gather(received, sent).wait()
    rows = [bytes(row.tolist()) for row in received.view(process_group.size(), -1)]
    return [(row[: len(payload)], row[len(payload) :].rstrip(b"\0").decode(errors="replace")) for row in rows]


def _first_reason(answers: list[tuple[bytes, str]]) -> str:
    """One of those who cannot; of those who only waited for them if there is no other."""
    reasons = [(NOBODY in why, f"rank {rank} of the group: {why}") for rank, (_, why) in enumerate(answers) if why]
    return min(reasons, default=(False, ""), key=lambda each: each[0])[1]


def _agreed(process_group: Any, attempt: Callable[[], None]) -> str:
    """Why `attempt` failed on a rank; "" if it did on none. Collective."""
    reason = ""
    try:
        attempt()
    except (OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
    return _first_reason(_all_gather(process_group, b"", reason))


def _connect(rank: int, names: list[bytes], secrets_: list[bytes], found: dict[int, socket.socket]) -> None:
    """Add the connections to the ranks before this one, which need not accept them yet."""
    for other in range(rank):
        found[other] = connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(SECONDS)
        connection.connect(b"\0" + names[other])
        if not _is_ours(connection):
            raise ValueError("a process of another user has taken the name of a socket")
        connection.sendall(_HANDSHAKE.pack(rank, secrets_[other]))


def _exchanged(found: dict[int, socket.socket], descriptors: Sequence[int], sizes: Sequence[int]) -> list[Peer]:
    """Send each its descriptors; the peers, with what they send."""
    for connection in found.values():
        socket.send_fds(connection, [b"\0"], list(descriptors))
    return [Peer(other, found[other], _receive(other, found[other], sizes)) for other in sorted(found)]


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        each.close()


def _accept(listener: socket.socket, secret: bytes, awaited: set[int], found: dict[int, socket.socket]) -> None:
    """Add the connections of the `awaited` ranks, which know the `secret`. Nobody else holds them up, whatever he sends
    or keeps to himself."""
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
    """The rank of who sent this; -1 for one who does not know the `secret`."""
    if len(handshake) < _HANDSHAKE.size:
        return -1
    rank, known = _HANDSHAKE.unpack(handshake)
    return int(rank) if hmac.compare_digest(known, secret) else -1


def _received(connection: socket.socket, size: int) -> bytes:
    try:
        return connection.recv(size)
    except OSError:  # it hung up
        return b""


def _receive(other: int, connection: socket.socket, sizes: Sequence[int]) -> list[MemorySegment]:
    """The segments that another rank sends, mapped."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, len(sizes))
    try:
        if len(descriptors) != len(sizes) or not all(map(is_sealed, descriptors, sizes)):
            raise ValueError(f"what rank {other} of the group shares is not what was agreed on")
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
