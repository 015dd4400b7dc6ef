"""The groups that the engine makes: how they are connected, and what they take over from the group they are like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from flatfsdp import FullyShardedDataParallel, ShardingStrategy
from flatfsdp.engine.agreement import process_groups
from flatfsdp.engine.base import _torch
from tests.harness import inspect
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process


@contextmanager
def bound_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A world whose default group is bound to a device, as by `init_process_group(device_id=...)`; the names of groups
    for which its communicator was to be split, which is collective over the world."""
    asked: list[str] = []
    with fake_world(4) as world:
        world.bound_device_id = torch.device("cuda", 0)

        def source(group: Any) -> None:
            asked.append("world" if group is world else "another group")

        monkeypatch.setattr(c10d, "_get_split_source", source)
        try:
            yield asked
            assert world.bound_device_id == torch.device("cuda", 0)
        finally:
            world.bound_device_id = None


MADE: dict[str, Callable[[Any], Any]] = {
    "by its members": lambda world: process_groups.new_group((0, 1), "wraps a module", like=world),
    "for a pickled model": lambda world: process_groups.plan_over(
        ShardingStrategy.FULL_SHARD, (0, 2), torch.device("cpu")
    ),
    "for reductions": lambda world: FullyShardedDataParallel(nn.Linear(4, 4), process_group=_part()),
    "of rows": lambda world: _rows(world),
}


def _part() -> Any:
    with _torch.without_split():
        return dist.new_group([0, 1])


def _rows(world: Any) -> Any:
    model = FullyShardedDataParallel(nn.Linear(4, 4), process_group=world, reshard_after_forward=2)
    return model(torch.randn(2, 4))


@pytest.mark.parametrize("how", MADE)
def test_a_part_of_the_world_is_not_split_from_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with bound_world(monkeypatch) as asked:
        before = len(asked)
        monkeypatch.setattr(process_groups.dist, "new_group", _unsplit_only(asked, dist.new_group))
        MADE[how](dist.group.WORLD)
    assert asked[before:] == []


def _unsplit_only(asked: list[str], make: Callable[..., Any]) -> Callable[..., Any]:
    """`new_group` that forgets splits for groups of the whole world, in which every rank takes part."""

    def made(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        before = len(asked)
        group = make(ranks, *args, **kwargs)
        if len(ranks) == dist.get_world_size():
            assert asked[before:] == ["world"], "a group as large as the world is split from it, which is faster"
            del asked[before:]
        return group

    return made


def test_the_default_group_stays_bound_if_no_group_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no connection")

    with bound_world(monkeypatch):
        monkeypatch.setattr(process_groups.dist, "new_group", broken)
        with pytest.raises(RuntimeError, match="no connection"):
            process_groups.new_group((0, 1), "wraps a module")


def test_a_group_for_reductions_has_the_backend_that_serves_the_device() -> None:
    """And no other: a mesh of gloo connections per group would be used by nobody."""
    with fake_world(4):
        mixed = dist.new_group(backend="cpu:fake,cuda:fake")
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
            model = FullyShardedDataParallel(nn.Linear(4, 4), process_group=mixed, sharding_strategy=strategy)
            made = inspect.unit(model).reduction_group
            assert dist.get_backend(made) == "fake"


def test_a_group_has_the_backend_of_the_group_that_it_is_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that of the default group: a user's nccl group was served by gloo."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(process_groups.dist, "new_group", lambda *args, **kwargs: asked.append(kwargs))
    with fake_world(4):
        users = dist.distributed_c10d.new_group([0, 1], backend="cpu:fake,cuda:fake")
        process_groups.new_group((0, 1), "wraps a module", like=users)
        process_groups.new_group((0, 1), "wraps a module", like=users, backend="fake")
        process_groups.new_group((0, 1), "wraps a module")
    assert [each["backend"] for each in asked] == ["cpu:fake,cuda:fake", "fake", "fake"]


class Options:
    """The options of torch's NCCL backend, as far as they are read here."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self.split_from: Any = None
        self.config = SimpleNamespace(max_ctas=32)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "TORCH_DISTRIBUTED_DEBUG"])
def test_a_group_has_the_options_of_the_group_that_it_is_like(wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Options()
    given.is_high_priority_stream, given.split_from, given.config.max_ctas = True, "a communicator", 4
    backend = SimpleNamespace(options=given)
    backend = SimpleNamespace(wrapped_pg=backend) if wrapped else backend
    found = _torch.nccl_options(SimpleNamespace(_device_types=["cuda"], _get_backend=lambda _: backend))
    assert (found.is_high_priority_stream, found.config.max_ctas) == (True, 4)
    assert found.split_from is None, "it is connected anew"
    assert given.split_from == "a communicator" and found.config is not given.config, "they are a copy"
    asked: list[Any] = []
    monkeypatch.setattr(_torch, "nccl_options", lambda group: found)
    monkeypatch.setattr(process_groups.dist, "new_group", lambda *args, **kwargs: asked.append(kwargs["pg_options"]))
    with fake_world(4):
        process_groups.new_group((0, 1), "wraps a module")
        assert _torch.time_limit(dist.group.WORLD) > 0
    assert asked == [found]


def test_groups_are_connected_in_less_time_than_their_operations_may_take() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        limit = _torch.time_limit(dist.group.WORLD)
        with process_groups.Connecting(7.0) as connecting:
            made = process_groups.new_group((0,), "tries")
            given: list[Any] = []
            with pytest.raises(RuntimeError, match="not there"):
                process_groups.with_time_limit(limit, lambda timeout: given.append(timeout) or fail())
        assert _torch.time_limit(made) == limit > 7.0
        assert connecting.failed and given[0].total_seconds() == 7.0
    finally:
        dist.destroy_process_group()


def fail() -> None:
    raise RuntimeError("a rank is not there")
