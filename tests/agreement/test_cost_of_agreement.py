"""The cost of agreement, in collectives, for worlds of any size; ranks compare nothing if nothing is communicated."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from tests.agreement.test_agreement import Net, scalars, step, wrap
from tests.harness import inspect
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

PARAMETERS = 6
RANK_CODE_EXTRA = 3 * 8  # bytes that each rank sends; in the exchange of models twice as many, for the turns of several


def with_bitmaps(steps: int, exchanges: int, size: int, *, axes: int = 1) -> list[tuple[int, int]]:
    """So many exchanges in the first step, and in each one a bitmap for each axis, a byte for each parameter."""
    return [(exchanges + axes * step, size + axes * step * PARAMETERS) for step in range(1, steps + 1)]


def cost_of_steps(count: int, **kwargs: object) -> list[tuple[int, int]]:
    """(exchanges, their bytes) so far, after each of `count` steps."""
    model = wrap(Net(), **kwargs)
    traffic = inspect.comm_stats(model)
    assert not traffic.counts, "constructors do not communicate"
    seen = []
    for _ in range(count):
        step(model)
        seen.append((traffic.counts["scalar"], traffic.bytes["scalar"]))
    return seen


@pytest.mark.parametrize("world", [2, 3, 8, 64])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_sharded_models(world: int, strategy: str) -> None:
    """The models with their values, four units, the end of the forward, the backward, its operations; only the bitmap
    after the first step."""
    with fake_world(world):
        exchanges = 1 + 4 + 3
        expected = with_bitmaps(3, exchanges, (exchanges + 1) * RANK_CODE_EXTRA * world)
        assert cost_of_steps(3, sharding_strategy=strategy) == expected


@pytest.mark.parametrize("world", [2, 64])
def test_replicated_models(world: int) -> None:
    """The models with their values; without shards only the backward communicates; the replicas, once."""
    with fake_world(world):
        assert cost_of_steps(3, sharding_strategy="NO_SHARD") == with_bitmaps(3, 4, 5 * RANK_CODE_EXTRA * world)
        plain = cost_of_steps(3, sharding_strategy="NO_SHARD", check_values="off")
        assert plain == with_bitmaps(3, 3, 4 * RANK_CODE_EXTRA * world)


def test_hybrid_models() -> None:
    """One exchange per axis; the second one exchanges the result of the first."""
    with fake_world(32):
        mesh = dist.init_device_mesh("cpu", (4, 8))
        exchanges = 1 + 4 + 3 + 1  # of the replicas, once
        expected = with_bitmaps(2, 2 * exchanges, (exchanges + 1) * RANK_CODE_EXTRA * (8 + 32), axes=2)
        assert cost_of_steps(2, sharding_strategy="HYBRID_SHARD", device_mesh=mesh) == expected


def test_with_fake_process_groups_other_ranks_lack_what_this_one_lacks() -> None:
    with fake_world(2):
        model = wrap(Net())
        step(model, order=(0, 2))
        weights = [block.linear.weight for block in model.module.blocks]
        assert [weight.grad is None for weight in weights] == [False, True, False]


def test_a_world_of_one_agrees_with_itself() -> None:
    with fake_world(1):
        assert cost_of_steps(2) == [(0, 0)] * 2


def test_no_thread_where_there_are_no_other_ranks() -> None:
    with fake_world(2):
        model = wrap(Net())
        step(model)
        step(model, order=(2, 1, 0))
        with torch.no_grad():
            model(torch.ones(2, 4))
        assert scalars(model) == 9 + 2  # after two backwards in a new order
        assert not [thread for thread in threading.enumerate() if thread.name == "flatfsdp watch"]
