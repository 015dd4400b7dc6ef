"""Optimizer state of many parameters, and at large worlds: its cost in calls, and the intervals of a rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp.errors import FlatFSDPError
from tests.harness import inspect
from tests.harness.calls import calls_of
from tests.harness.fake import fake_world
from tests.harness.models import WIDTH, Feedforward

pytestmark = pytest.mark.single_process


def model_and_optimizer(depth: int, *, orig: bool = True) -> tuple[Any, torch.optim.Optimizer]:
    made = nn.Sequential(*(Feedforward(WIDTH, 20) for _ in range(depth)))
    model = FSDP(made, use_orig_params=orig, auto_wrap_policy={Feedforward})
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    optim.step()
    return model, optim


def costs(depth: int) -> list[int]:
    """Calls of saving whole and in intervals, and of loading each."""
    model, optim = model_and_optimizer(depth)
    whole = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    mine = FSDP.sharded_optim_state_dict(model, optim)
    work: list[Callable[[], Any]] = [
        lambda: FSDP.full_optim_state_dict(model, optim),
        lambda: FSDP.sharded_optim_state_dict(model, optim),
        lambda: FSDP.shard_full_optim_state_dict(whole, model, optim=optim),
        lambda: FSDP.flatten_sharded_optim_state_dict(mine, model, optim),
    ]
    return [calls_of(each) for each in work]


def test_calls_grow_with_parameters() -> None:
    with fake_world(2):
        for small, large in zip(costs(6), costs(24), strict=True):
            assert large < 4.4 * small


@pytest.mark.parametrize(("world", "rank"), [(1024, 0), (1024, 700), (4096, 4095)])
def test_a_rank_of_many_has_what_it_owns(world: int, rank: int) -> None:
    with fake_world(world, rank):
        model, optim = model_and_optimizer(2, orig=False)
        state = FSDP.sharded_optim_state_dict(model, optim)["state"]
        for unit in inspect.units(model):
            for flat in unit.flat_params:
                owned = {flat.layout.params[each.index].name: each for each in flat.layout.owned(rank)}
                for spec in flat.layout.params:
                    value = state[f"{unit.name}.{spec.name}" if unit.name else spec.name]["exp_avg"]
                    piece = owned.get(spec.name)
                    assert value.shape == spec.shape
                    assert value.span.numel == value.local.numel() == (piece.in_param.numel if piece else 0)
                    if piece:
                        assert value.span == piece.in_param
                        moments = optim.state[flat.parameter]["exp_avg"]
                        assert torch.equal(value.local, moments[piece.in_shard.slice])


def test_models_are_freed_without_the_garbage_collector() -> None:
    def use(*, refused: bool) -> list[weakref.ref[Any]]:
        model, optim = model_and_optimizer(1)
        FSDP.full_optim_state_dict(model, torch.optim.Adam(model.parameters()))
        whole = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        optim.load_state_dict(FSDP.scatter_full_optim_state_dict(whole, model, optim=optim))
        if refused:
            with pytest.raises(FlatFSDPError):
                FSDP.optim_state_dict_to_load(model, optim, {**whole, "state": {"wrong": {}}})
        return [weakref.ref(model), weakref.ref(optim)]

    with fake_world(2):
        use(refused=True)  # torch keeps objects of its first optimizer
        gc.collect()
        gc.disable()
        try:
            alive = [ref() is not None for refused in (False, True) for ref in use(refused=refused)]
        finally:
            gc.enable()
    assert alive == [False] * 4
