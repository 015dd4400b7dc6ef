"""Messages between two ranks, as a state dict from rank 0 sends them, over each backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from flatfsdp.engine.comm.axes import Axis, served_as
from flatfsdp.engine.comm.comm_stats import CommStats
from flatfsdp.engine.device.memory import MemoryTracker
from flatfsdp.engine.device.streams import Device
from flatfsdp.engine.transports import blocking
from flatfsdp.engine.transports.blocking import scatter_now
from flatfsdp.engine.wrapping.exchanges import EXCHANGES
from tests.comm.test_communication import Collectives
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

WORLD = 4
CPU = torch.device("cpu")


def scattered(rank: int, backend: str) -> Collectives:
    with fake_world(WORLD, rank) as world, served_as(backend), Collectives() as seen:
        axis = Axis.of(world, CPU)
        made = EXCHANGES.transport(axis, Device(CPU), comm_stats=CommStats(), tracker=MemoryTracker())
        scatter_now(made, torch.zeros(6, dtype=torch.int64), lambda to: torch.full((6,), to))
        assert made.comm_stats.messages == (1 if rank else WORLD - 1)
    return seen


@pytest.mark.parametrize("rank", [0, 2])
def test_nccl_gets_no_bare_send_or_receive(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would make a communicator for the pair of ranks."""
    batches: list[tuple[Any, int]] = []
    orders: list[str] = []

    def batch(messages: list[dist.P2POp]) -> list[Any]:
        (message,) = messages
        assert message.tensor.nbytes == 6 * 8
        batches.append((message.op, message.peer))
        orders.append("message")
        return []

    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    monkeypatch.setattr(blocking, "all_reduce_now", lambda axis, tensor: orders.append("all ranks"))
    seen = scattered(rank, "nccl")
    assert batches == ([(dist.irecv, 0)] if rank else [(dist.isend, to) for to in range(1, WORLD)])
    assert orders[0] == "all ranks", "a batch of two ranks cannot connect the others"
    assert not seen.counts.keys() & {"send", "recv_"}


@pytest.mark.parametrize("rank", [0, 2])
def test_gloo_sends_and_receives(rank: int) -> None:
    seen = scattered(rank, "gloo")
    assert dict(seen.counts) == ({"recv_": 1} if rank else {"send": WORLD - 1})
