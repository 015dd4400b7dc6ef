"""The end of a process, or that it is stopped, is noticed by its neighbors."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from typing import Any

import pytest
import torch.distributed as dist

from flatfsdp.elastic.neighbors import NEIGHBORS, Neighbors
from flatfsdp.errors import LostRankError
from tests.harness.fresh import Outcome

pytestmark = pytest.mark.process

WORLD = 6


def in_a_row(rank: int, world: int, odd: int, what: str, lost_after: float) -> list[tuple[int, str]]:
    """Connect this process to its neighbors, and let one be killed or stopped. Returned: who is gone."""
    gone: list[tuple[int, str]] = []
    found = Neighbors(rank, "127.0.0.1", lost_after=lost_after, gone=lambda number, words: gone.append((number, words)))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"address {rank}", json.dumps(found.address))
    addresses: dict[int, Any] = {number: json.loads(store.get(f"address {number}")) for number in range(world)}
    found.connect(range(world), addresses)
    store.add("here", 1)
    while store.add("here", 0) < world or len(found.known) < min(2 * NEIGHBORS, world - 1):
        time.sleep(0.01)
    time.sleep(0.3)  # all have seen that
    if rank == odd and what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == odd and what == "stopped":
        if os.fork() == 0:
            time.sleep(8)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline and not gone:
        time.sleep(0.01)
    time.sleep(0.5)
    seen = list(gone)
    store.add("done", 1)
    while store.add("done", 0) < world - (what == "killed"):
        time.sleep(0.01)
    found.close()
    return seen


@pytest.mark.ranks(WORLD, in_a_row, of=["odd", "what", "lost_after"], timeout=60)
@pytest.mark.parametrize(("odd", "what", "lost_after"), [(0, "killed", 60.0), (3, "killed", 60.0), (5, "stopped", 2.5)])
def test_all_neighbors_notice_an_end_and_no_other_is_gone(
    outcomes: list[Outcome], odd: int, what: str, lost_after: float
) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank != odd:
            assert outcome.error is None, outcome
            is_near = (rank - odd) % WORLD in (1, 2, WORLD - 1, WORLD - 2)
            assert [number for number, _ in outcome.result] == [odd] * is_near, outcome
            words = "has ended" if what == "killed" else "has sent nothing for"
            assert all(words in each for _, each in outcome.result), outcome


def test_a_stranger_is_sent_away() -> None:
    gone: list[int] = []
    found = Neighbors(0, "127.0.0.1", lost_after=60.0, gone=lambda number, words: gone.append(number))
    host, port, _ = found.address
    with socket.create_connection((host, port), timeout=10) as line:
        line.sendall(b"\0\0\0\1" + b"x" * 16)
        try:
            while line.recv(16):
                pass
        except ConnectionError:
            pass
    found.close()
    assert not gone and not found.known


def test_one_that_cannot_be_reached_is_gone() -> None:
    gone: list[int] = []
    found = Neighbors(0, "127.0.0.1", lost_after=60.0, gone=lambda number, words: gone.append(number))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    try:
        with pytest.raises(LostRankError, match="rank 1, which cannot be reached at 127"):
            found.connect([0, 7], {7: ("127.0.0.1", port, found.address[2])})
    finally:
        found.close()
    assert gone == [7]


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_an_address_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6")
    zero, one = (Neighbors(number, "::1", lost_after=60.0, gone=lambda *unused: None) for number in range(2))
    try:
        zero.connect([0, 1], {1: one.address})
        deadline = time.monotonic() + 10
        while one.known != {0} and time.monotonic() < deadline:
            time.sleep(0.01)
        assert zero.known == {1} and one.known == {0}
    finally:
        zero.close()
        one.close()
