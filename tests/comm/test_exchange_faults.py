"""Faults that end a process if an exchange is careless with gloo: late peers, messages of user code, dead peers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.comm.axes import Axis
from flatfsdp.engine.comm.comm_stats import CommStats
from flatfsdp.engine.comm.transport import Transport
from flatfsdp.engine.cpu.groups import over_gloo
from flatfsdp.engine.device.memory import MemoryTracker
from flatfsdp.engine.device.streams import Device
from flatfsdp.engine.watchdog.watchdog import is_lost_connection
from flatfsdp.engine.wrapping.exchanges import EXCHANGES
from flatfsdp.wrap import ModuleWrapPolicy
from tests.harness import fresh

pytestmark = pytest.mark.process

WIDTH = 768  # a unit is large enough to be gathered in place


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.before: Any = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.before()
        return x + self.linear(x).relu()


def train(rank: int, disturb: Any) -> list[float]:
    """Losses of four steps; `disturb(rank, step, block)` runs in every block's forward."""
    with over_gloo():
        return _train(rank, disturb)


def _train(rank: int, disturb: Any) -> list[float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Sequential(*(Block() for _ in range(3))),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        forward_prefetch=True,
        use_orig_params=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []
    for index, block in enumerate(model.module):
        block.module.before = lambda index=index: disturb(rank, len(losses), index)
    for step in range(4):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def undisturbed(rank: int, step: int, block: int) -> None:
    pass


def late(rank: int, world: int) -> tuple[list[float], list[float]]:
    """Rank 1 sleeps before a step, until rank 0 has finished its own, and inside a forward."""
    dist.init_process_group("gloo")

    def sleep(rank: int, step: int, block: int) -> None:
        if rank == 1 and (step, block) in ((1, 0), (2, 1)):
            time.sleep(2)

    return train(rank, undisturbed), train(rank, sleep)


def users_own(rank: int, world: int) -> tuple[list[float], list[float]]:
    """Messages of user code, with the tag that users choose, and collectives, over the group that the engine uses,
    while a gather is in flight. Rank 1 posts its messages a gather later."""
    dist.init_process_group("gloo")
    waiting: list[tuple[Any, Tensor, float]] = []

    def communicate(rank: int, step: int, block: int) -> None:
        if block == rank:
            mine, theirs = torch.full((500,), 1.0 + rank), torch.empty(500)
            waiting.append((dist.isend(mine, 1 - rank, tag=0), mine, 1.0 + rank))
            waiting.append((dist.irecv(theirs, 1 - rank, tag=0), theirs, 2.0 - rank))
        total = torch.ones(3)
        waiting.append((dist.all_reduce(total, async_op=True), total, 2.0))
        dist.monitored_barrier(timeout=timedelta(seconds=20))
        if block == 2:
            for work, tensor, expected in waiting:
                work.wait()
                assert tensor.eq(expected).all()
            waiting.clear()

    return train(rank, undisturbed), train(rank, communicate)


@pytest.mark.parametrize("disturbance", [late, users_own])  # of a rank that frees and steps meanwhile
def test_losses_are_the_same_beside(disturbance: Callable[[int, int], Any]) -> None:
    for outcome in fresh.run(2, disturbance, timeout=120):
        assert outcome.error is None and outcome.exit_code == 0, outcome
        plain, disturbed = outcome.result
        assert plain == disturbed


CPU = torch.device("cpu")


def over_all() -> Transport:
    dist.init_process_group("gloo")
    return EXCHANGES.transport(
        Axis.of(dist.group.WORLD, CPU), Device(CPU), comm_stats=CommStats(), tracker=MemoryTracker()
    )


def die(rank: int, world: int, kind: str) -> str:
    """Rank 1 dies where the others have an exchange under way, which it has not joined; the reports of the others."""
    with over_gloo():
        return _die(rank, world, kind)


def _die(rank: int, world: int, kind: str) -> str:
    transport = over_all()
    stream, size = Device(CPU).new_stream("test"), 8 * 1024 * 1024
    shard, whole = torch.ones(size), torch.empty(world * size)
    transport.all_gather_base(whole, shard, stream).wait()
    if rank == 1:
        time.sleep(0.2)
        os._exit(7)
    try:
        if kind == "gather":
            pending = transport.all_gather_base(whole, shard, stream)
        elif kind == "reduce-scatter":
            pending = transport.reduce_scatter_base(shard, whole, stream)
        else:
            pending = transport.all_reduce(whole, stream)
        pending.wait()
    except RuntimeError as error:
        assert is_lost_connection(error)
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "world"), [("gather", 2), ("reduce-scatter", 2), ("reduce-scatter", 3), ("all-reduce", 2)]
)
def test_a_peer_dies_before_its_part_of_a_large_message(kind: str, world: int) -> None:
    """If the dead rank's part was complete, and only the survivor's was not, gloo wakes no rank: then the watchdog ends
    the job (`test_faults.py`)."""
    first, dead, *others = fresh.run(world, die, kind, timeout=120.0)
    survivors = [first, *others]
    assert dead.exit_code == 7
    for survivor in survivors:
        assert survivor.error is None, survivor
        assert "Connection closed by peer" in survivor.result or "reset by peer" in survivor.result


def forget(rank: int, world: int) -> None:
    """No rank keeps a reference to its posted work."""
    with over_gloo():
        _forget(world)


def _forget(world: int) -> None:
    transport = over_all()
    stream, size = Device(CPU).new_stream("test"), 2 * 1024 * 1024
    for _ in range(3):
        transport.all_gather_base(torch.empty(world * size), torch.ones(size), stream)
        transport.reduce_scatter_base(torch.empty(size), torch.ones(world * size), stream)
    dist.barrier()
    output = torch.empty(size)
    transport.reduce_scatter_base(output, torch.ones(world * size), stream).wait()
    assert output.eq(world).all()


@pytest.mark.parametrize("world", [3])
def test_an_exchange_that_nobody_waits_for_does_no_harm(world: int) -> None:
    for outcome in fresh.run(world, forget, timeout=120):
        assert (outcome.exit_code, outcome.error) == (0, None), outcome
