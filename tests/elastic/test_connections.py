"""Connections between ranks are found by what these publish, and end from outside; others stay."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from flatfsdp.elastic import connections
from flatfsdp.elastic.connections import Connection

pytestmark = pytest.mark.unit


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Both ends of three connections, and the first one's port is that of its listener."""
    with ExitStack() as stack:
        made = []
        for _ in range(3):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            one = stack.enter_context(socket.create_connection(listener.getsockname()))
            made.append((one, stack.enter_context(listener.accept()[0])))
        yield made


def view(one: socket.socket) -> Connection:
    return Connection(one.getsockname(), one.getpeername())


def is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(1) != b""
    except BlockingIOError:
        return True


def test_only_connections_that_another_rank_has_published_end(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    (one, other), (kept, far), (store, server) = pairs
    found = connections.open_connections()
    assert {view(each) for pair in pairs for each in pair} <= found.keys()
    theirs = [Connection(*map(tuple, view(each))) for each in (other, server)]  # type: ignore[arg-type]
    assert connections.sever([theirs], keep=[server.getsockname()[1]]) == 1
    assert not is_open(one) and not is_open(other)
    assert is_open(kept) and is_open(far) and is_open(store) and is_open(server)


def test_a_wait_on_a_severed_connection_ends(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    one, other = pairs[0]
    one.settimeout(30)
    assert connections.sever([[view(other)]]) == 1
    assert one.recv(1) == b""


def test_a_connection_that_has_the_descriptor_of_a_closed_one_stays(
    pairs: list[tuple[socket.socket, socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, _), (later, _), _ = pairs
    monkeypatch.setattr(connections, "open_connections", lambda: {view(one): later.fileno()})
    assert connections.shut({view(one)}) == 0
    assert is_open(later)


def test_listening_ports(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    ports = connections.listening_ports()
    for _, accepted in pairs:
        assert accepted.getsockname()[1] in ports


def test_connections_are_plain_data() -> None:
    made = Connection(("127.0.0.1", 5), ("10.0.0.1", 70))
    assert Connection.of([["127.0.0.1", 5], ["10.0.0.1", 70]]) == made
    assert made.reversed == Connection(("10.0.0.1", 70), ("127.0.0.1", 5))
    for wrong in (None, [], [["127.0.0.1", "5"], ["10.0.0.1", 70]], [[1, 5], ["10.0.0.1", 70]], "ab"):
        assert Connection.of(wrong) is None
