"""How the ranks of a process group come to map each other's segments, or agree that they cannot.

[Note: introductions] Each rank listens on a socket without a file (an abstract name, which is random), and tells its
name, and a secret, to the ranks of the group by a collective of the group. Ranks connect in pairs; each side sends the
descriptors of its segments, once it has seen that the other is a process of the same user and knows the secret. The
connections stay: a process that ends closes its side, which is how its peers notice.
"""

from __future__ import annotations

import hmac
import os
import platform
import secrets
import select
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...base import _torch
from ...base.wait_limits import blocked
from .segments import create, is_sealed

NAME, SECRET, REASON = 16, 32, 160  # bytes
SECONDS = 20.0  # that a rank waits for another one's connection
_HELLO = struct.Struct(f"=I{SECRET}s")


class Peer:
    """Another rank of the group.

    Attributes:
        rank: in the group. descriptors: of its segments, to be closed once they are mapped.
    """

    def __init__(self, rank: int, connection: socket.socket, descriptors: list[int]) -> None:
        self.rank = rank
        self.descriptors = descriptors
        self._connection = connection

    @property
    def has_ended(self) -> bool:
        """Whether its process has, or has let go of the group."""
        return bool(select.select([self._connection], [], [], 0)[0])  # nothing is ever sent: it is the end

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


def introduce(
    process_group: Any, descriptors: Sequence[int], sizes: Sequence[int], obstacle: str
) -> tuple[list[Peer], str]:
    """The peers of this rank, each with descriptors of segments of these `sizes`, as are given here; or none, and why.

    Collective over the group. `obstacle`: why this rank cannot; then no rank does. All ranks get the same answer.
    """
    rank = process_group.rank()
    listener, name, secret = None, b"", secrets.token_bytes(SECRET)
    if not obstacle:
        try:
            listener, name = _listen(process_group.size())
        except OSError as error:
            obstacle = f"no local socket: {error}"
    try:
        answers = _tell_all(process_group, name.ljust(NAME, b"\0") + secret + _host(), obstacle)
        if why := _first_reason(answers):
            return [], why
        if len({payload[NAME + SECRET :] for payload, _ in answers}) > 1:
            return [], "the ranks are on several hosts"
        peers, trouble = [], ""
        try:
            assert listener is not None
            names = [payload[:NAME] for payload, _ in answers]
            keys = [payload[NAME : NAME + SECRET] for payload, _ in answers]
            peers = _connect(rank, listener, names, keys, descriptors, sizes)
        except (OSError, ValueError) as error:
            trouble = f"{type(error).__name__}: {error}"
        if why := _first_reason(_tell_all(process_group, b"", trouble)):
            for peer in peers:
                peer.close()
                for descriptor in peer.descriptors:
                    os.close(descriptor)
            return [], why
        return peers, ""
    finally:
        if listener is not None:
            listener.close()


def _listen(world: int) -> tuple[socket.socket, bytes]:
    name = secrets.token_hex(NAME // 2).encode()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(b"\0" + name)
        listener.listen(world)
    except BaseException:
        listener.close()
        raise
    return listener, name


def _host() -> bytes:
    """16 bytes that are this system's since it was started, and the network's whose sockets it sees."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return bytes.fromhex(boot.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return platform.node().encode()[:16].ljust(16, b"\0")


def _tell_all(process_group: Any, payload: bytes, reason: str) -> list[tuple[bytes, str]]:
    """Every rank's `payload`, of one length on all of them, and its reason against. Collective."""
    said = payload + reason.encode()[:REASON].ljust(REASON, b"\0")
    sent = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    received = torch.empty(process_group.size() * len(said), dtype=torch.uint8)
    with blocked():
        _torch.FlatCollectives(process_group, beside=False).gather(received, sent).wait()
    rows = [bytes(row.tolist()) for row in received.view(process_group.size(), -1)]
    return [(row[: len(payload)], row[len(payload) :].rstrip(b"\0").decode(errors="replace")) for row in rows]


def _first_reason(answers: list[tuple[bytes, str]]) -> str:
    return next((f"rank {rank} of the group: {why}" for rank, (_, why) in enumerate(answers) if why), "")


def _connect(
    rank: int,
    listener: socket.socket,
    names: list[bytes],
    secrets_: list[bytes],
    descriptors: Sequence[int],
    sizes: Sequence[int],
) -> list[Peer]:
    """To the ranks before this one; the others come."""
    found: dict[int, socket.socket] = {}
    peers = []
    try:
        for other in range(rank):
            found[other] = connection = _socket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.connect(b"\0" + names[other])
            if not _is_ours(connection):
                raise ValueError("a process of another user has taken the name of a socket")
            connection.sendall(_HELLO.pack(rank, secrets_[other]))
        listener.settimeout(SECONDS)
        while len(found) < len(names) - 1:
            connection = _socket(listener.accept()[0])
            if not _is_ours(connection):
                connection.close()
                continue
            other, secret = _HELLO.unpack(_receive(connection, _HELLO.size))
            if not hmac.compare_digest(secret, secrets_[rank]) or not rank < other < len(names) or other in found:
                connection.close()  # of another job
                continue
            found[other] = connection
        for connection in found.values():
            socket.send_fds(connection, [b"\0"], list(descriptors))
        for other, connection in sorted(found.items()):
            _, received, _, _ = socket.recv_fds(connection, 1, len(descriptors))
            peers.append(Peer(other, connection, received))
            if len(received) != len(sizes) or not all(map(is_sealed, received, sizes)):
                raise ValueError(f"what rank {other} of the group shares is not what was agreed on")
    except BaseException:
        for connection in found.values():
            connection.close()
        for peer in peers:
            for descriptor in peer.descriptors:
                os.close(descriptor)
        raise
    return peers


def _socket(made: socket.socket) -> socket.socket:
    made.settimeout(SECONDS)
    return made


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        if not (more := connection.recv(size - len(received))):
            raise ValueError("the connection was closed")
        received += more
    return received


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end is of the same user."""
    credentials = struct.Struct("3i")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    _, user, _ = credentials.unpack(raw)
    return bool(user == os.getuid())
