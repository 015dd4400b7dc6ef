"""The figures of advice are those of real ranks that shard the model in that way."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

from flatfsdp import (
    FullyShardedDataParallel,
    Plan,
    ShardingStrategy,
    advise,
    matrix_steps,
    stats,
    unsharded_shapes,
)
from flatfsdp.engine.base._dtensor import local_bytes
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.thorough import some, spread
from tests.inspection.test_advise import Block, Net, adam

pytestmark = pytest.mark.distributed

STEPS = 4


def muon(model: Any) -> torch.optim.Optimizer:
    shapes = unsharded_shapes(model)
    matrices = [each for name, each in model.named_parameters() if len(shapes[name]) == 2]
    return matrix_steps(partial(torch.optim.Muon, lr=0.1), matrices, bucket_bytes=4096).optimizer


def lived(rank: int, world: int, shards: int, units: str, layout: str, make: Any = adam) -> dict[str, Any]:
    """Figures of the last of some real steps."""
    torch.manual_seed(0)
    groups, strategy = None, ShardingStrategy.FULL_SHARD
    if shards == 1:
        strategy = ShardingStrategy.NO_SHARD
    elif shards < world:
        strategy = ShardingStrategy.HYBRID_SHARD
        made = torch.distributed.new_subgroups(shards)[0]
        lists = [list(range(first, world, shards)) for first in range(shards)]
        groups = made, torch.distributed.new_subgroups_by_enumeration(lists)[0]
    model = FullyShardedDataParallel(
        Net(), groups, strategy, auto_wrap_policy=POLICIES[units], use_orig_params=True, layout=layout
    )
    optimizer, figures = make(model), stats(model)
    for step in range(STEPS):
        figures.reset()
        model(torch.tensor([[rank, step]])).sum().backward()
        found: dict[str, Any] = {"unsharded_peak": figures.bytes_unsharded_peak}
        found["grads"], found["at_peak"] = figures.bytes_grads, figures.bytes_at_peak
        optimizer.step()
        found["comm"], found["matrices"] = figures.comm, inspect.memory(model).peak("matrices")
        model.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return found | {"params": figures.bytes_params, "states": sum(map(local_bytes, states))}


POLICIES: dict[str, Any] = {"model": None, "blocks": {Block}}


@cache
def planned(make: Any, units: str, layout: str) -> dict[int, Plan]:
    """The plans of advice, by shards."""
    chosen: dict[str, Any] = {"units": {units: POLICIES[units]}, "layouts": {layout: layout}}
    advice = advise(Net(), ranks=4, node=2, optimizer=make, accelerator=False, use_orig_params=True, **chosen)
    return {each.way.shards: each.plan for each in advice.choices}


@pytest.mark.parametrize(("make", "shards"), spread([adam, muon], [4, 2, 1]))
def test_figures_are_those_of_the_real_run(shards: int, make: Any, run: Run) -> None:
    for units, layout in some((("model", "flat"), ("blocks", "flat"), ("blocks", "rows")), 2, shards // 2):
        plan = planned(make, units, layout)[shards]
        found = run(4, lived, shards, units, layout, make)[0]
        assert found.pop("states") == sum(plan.optimizer.values())
        assert {key: getattr(plan, key) for key in found} == found
