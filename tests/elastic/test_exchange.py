"""Versions over real ranks: what one of them had comes back from the others, over gloo."""

from __future__ import annotations

import random

import pytest
import torch

from flatfsdp.elastic.exchange import EpochRanks
from flatfsdp.elastic.holding import Entry, Facts, Holding
from flatfsdp.elastic.keeper import Keeper
from flatfsdp.elastic.machines import Machines
from flatfsdp.elastic.parity import parity_groups
from flatfsdp.elastic.snapshot import Block
from flatfsdp.engine.base.plain_data import encode
from flatfsdp.messages import gather_bytes
from tests.harness import pool

pytestmark = pytest.mark.distributed


def rebuilt(rank: int, world: int, size: int) -> None:
    groups = parity_groups(range(world), size)
    ranks, keeper = EpochRanks(), Keeper(rank, (Block(), Block()), Machines(tuple(range(world)), {}), groups=groups)
    rng = random.Random(rank)
    for number in range(3):
        data = torch.frombuffer(bytearray(rng.randbytes(70_000 + 9_000 * rank + 100 * number)), dtype=torch.uint8)
        entry = Entry(f"of rank {rank}", "", torch.uint8, (data.numel(),), None, 0, data.numel())
        facts = encode((encode((entry,)), {}, ()))
        keeper.complete(keeper.begin(number, Holding(Facts((entry,), {}, ()), [data]), facts), ranks)
    blocks = gather_bytes(bytes(data.tolist()), ranks.all)
    for lost in range(world):
        # The lost one has a machine of its own, and takes part in no message.
        rank_of = {each: each for each in range(world)}
        count = 0
        if rank != lost:
            _, *parts = keeper.brought(2, [lost], rank_of, ranks)
            assert len(parts) == (lost in keeper.members)
            for part in parts:
                for entry, tensor in zip(part.facts.entries, part.tensors, strict=True):
                    assert entry.name == f"of rank {lost}"
                    assert bytes(tensor.tolist()) == blocks[lost][entry.start : entry.start + entry.numel]
                    count += entry.numel
        assert sum(map(int, gather_bytes(str(count).encode(), ranks.all))) == len(blocks[lost])


@pytest.mark.parametrize(("world", "size"), [(2, 2), (3, 2), (3, 4), (4, 2), (4, 4)])
def test_the_block_of_any_rank_is_rebuilt(world: int, size: int) -> None:
    pool.run(world, rebuilt, size)
