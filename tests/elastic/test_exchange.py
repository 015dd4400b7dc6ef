"""Versions over real ranks: what one of them had comes back from the others, through shared memory and gloo."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch

from flatfsdp.elastic.exchange import ParityRanks
from flatfsdp.elastic.keeper import Keeper
from flatfsdp.elastic.parity import parity_groups
from flatfsdp.elastic.snapshot import Block
from flatfsdp.engine.cpu.groups import over_gloo
from flatfsdp.messages import gather_bytes
from tests.harness import pool

pytestmark = pytest.mark.distributed


def rebuilt(rank: int, world: int, size: int, messages: bool) -> None:
    with over_gloo() if messages else nullcontext():
        members = next(each for each in parity_groups(range(world), size) if rank in each)
        ranks, keeper = ParityRanks(), Keeper(members, rank, (Block(), Block()))
        ranks.divide(members)
        rng = random.Random(rank)
        for number in range(3):
            data = torch.frombuffer(bytearray(rng.randbytes(70_000 + 9_000 * rank + 100 * number)), dtype=torch.uint8)
            tail = rng.randbytes(50 * number)

            def take(block: Block, data: torch.Tensor = data, tail: bytes = tail) -> None:
                block.take([data[:1000], data[1024:]], [0, 1024], data.numel(), tail)

            keeper.complete(keeper.begin(number, take), ranks)
        version = keeper.version(2)
        own = bytes(version.block.memory[: version.block.nbytes].tolist())
        blocks = gather_bytes(own, ranks.all)
        for lost in range(world):
            sent, awaited, place = {}, {}, members.index(lost) if lost in members else None
            if rank != lost:
                sent = {members[each]: part for each, part in keeper.parts_to_send(version, [lost]).items()}
                awaited = {members[each]: count for each, count in keeper.parts_to_receive(version, [lost]).items()}
            arrived = ranks.send_parts(sent, awaited)
            part = keeper.rebuild(version, [lost], arrived) if rank != lost else None
            assert (part is not None) == (place is not None and rank != lost)
            if part is not None:
                found = bytes(part.data.tolist())
                assert part.member == place and found == blocks[lost][part.start : part.start + len(found)]
        assert all(len(block) == 70_000 + 9_000 * each + 200 + 100 for each, block in enumerate(blocks))


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize(("world", "size"), [(2, 2), (3, 2), (3, 4), (4, 2), (4, 4)])
def test_the_block_of_any_rank_is_rebuilt(world: int, size: int, messages: bool) -> None:
    pool.run(world, rebuilt, size, messages)
