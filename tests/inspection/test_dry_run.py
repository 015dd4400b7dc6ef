"""A dry run is a job of any size on any machine: it needs no memory, changes nothing outside, and reports errors."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, Plan, dry_run, memory_plan, stats
from flatfsdp.engine.base import wait_limits
from flatfsdp.errors import ConfigValueError, UsageError, current_rank
from flatfsdp.trainer.arguments import OPTIMIZERS
from tests.harness.calls import calls_of
from tests.harness.fake import fake_world
from tests.harness.memory import peak_bytes
from tests.harness.models import CASES
from tests.wrapping import test_construction_at_scale as at_scale

pytestmark = pytest.mark.single_process


class Tied(nn.Module):
    """Without `reset_parameters()` of its own, and with a weight that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.inner = nn.Linear(16, 8, bias=False)
        self.outer = nn.Linear(16, 8, bias=False)
        self.outer.weight = self.inner.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale).sum() + self.outer(x).sum()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_from_anywhere_trains_inside_and_counts(device: str) -> None:
    with torch.device(device):
        model = Tied()
    before = current_rank()
    with dry_run(4, rank=3):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 4)
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy={nn.Linear}, use_orig_params=True)
        optimizer = torch.optim.Adam(wrapped.parameters())
        wrapped(torch.ones(2, 16)).backward()
        optimizer.step()
        figures = stats(wrapped)
        assert figures.bytes_params == figures.bytes_grads == 4 * (16 + 128) // 4
        assert figures.comm["reduce_scatter"] == (2, 4 * (16 + 128))
        held = memory_plan(wrapped, optimizer)
        assert (held.params, held.buffers, held.optimizer["exp_avg"]) == (144, 12, 144)
        assert held.between_steps == 144 + 12 + 2 * 144 + 2 * 4
        assert wrapped(torch.ones(2, 16)).shape == ()  # its own forward again
    assert not dist.is_initialized()
    assert current_rank() == before
    assert torch.ones(2).sum().item() == 2


def lived(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the third step of a model, on real tensors and simulated."""
    case = CASES[name]
    options: dict[str, Any] = {"auto_wrap_policy": set(case.units), "join_units_below": 0, "use_orig_params": True}
    with fake_world(4):
        model = FullyShardedDataParallel(case.build(), **options)
        figures = stats(model)
        for step in range(3):
            figures.reset()
            case.loss(model, case.batch(0, step)).backward()
            grads = figures.bytes_grads
            model.zero_grad()
        found = {"comm": figures.comm, "params": figures.bytes_params, "grads": grads}
        found["unsharded_peak"] = figures.bytes_unsharded_peak
    plain = case.build()
    with dry_run(4):
        made = asdict(memory_plan(FullyShardedDataParallel(plain, **options)))
    return {key: made[key] for key in found}, found


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_what_a_step_holds_and_sends(name: str) -> None:
    planned, found = lived(name)
    if name in ("unused", "reached"):  # no forward shows the plan which parameters none will reach
        assert planned.pop("grads") > found.pop("grads")
    assert planned == found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_the_trainer_is_foretold(name: str) -> None:
    case = CASES["mlp"]

    def wrapped() -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
        model = FullyShardedDataParallel(plain, auto_wrap_policy=set(case.units))
        return model, OPTIMIZERS[name](model.parameters())  # type: ignore[call-arg]

    plain = case.build()
    with fake_world(4):
        model, optimizer = wrapped()
        case.loss(model, case.batch(0, 0)).backward()
        optimizer.step()
        real: Counter[str] = Counter()
        for state in optimizer.state.values():
            real.update({key: value.nbytes for key, value in state.items() if isinstance(value, Tensor)})
    plain = case.build()
    with dry_run(4):
        assert memory_plan(*wrapped()).optimizer == real


def planned_at_scale(blocks: int, ranks: int) -> Plan:
    """Of a decoder, 0.9 billion parameters a block, in bfloat16."""
    with torch.device("meta"), patch.object(at_scale, "BLOCKS", blocks):
        model = at_scale.Decoder().bfloat16()
    with dry_run(ranks, rank=ranks - 1):
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy={at_scale.Block}, use_orig_params=True)
        return memory_plan(wrapped, torch.optim.AdamW(wrapped.parameters()))


def test_billions_of_parameters_on_a_thousand_ranks_need_no_memory() -> None:
    found: list[Plan] = []
    peak, _ = peak_bytes(lambda: found.append(planned_at_scale(4, 1024)))
    assert peak < 2**20
    (made,) = found
    sizes = {unit.module: unit.parameters for unit in made.units}
    block, root = sizes["Block"], sizes["Decoder"]
    whole = 4 * block + root
    assert whole > 5e9
    assert made.params == made.grads == made.optimizer["exp_avg"] == made.optimizer["exp_avg_sq"] == 2 * whole // 1024
    assert made.unsharded_peak == 2 * (root + 2 * block)
    traffic = {"all_gather": (5 + 3 + 1, 2 * (2 * whole - root)), "reduce_scatter": (5, 2 * whole)}
    assert made.comm == {**traffic, "scalar": (1, 39)}  # a byte for each parameter


def test_what_a_plan_costs_depends_on_units_and_not_on_ranks() -> None:
    """In calls, of which a slow machine makes two million in a second."""

    def cost(blocks: int, ranks: int) -> int:
        return calls_of(lambda: planned_at_scale(blocks, ranks))

    for ranks in (16, 1024):
        cost(1, ranks)  # one-time work
    few, more, most = (cost(blocks, 16) for blocks in (1, 2, 3))
    assert most - more < 1.1 * (more - few)
    assert most - more < 150_000
    assert cost(1, 1024) < 1.1 * few


def test_memory_of_an_accelerator_is_given_back_late() -> None:
    """With the limit, the unit before the one in use may hold its memory still; without, all of them may."""

    def peak(*, accelerator: bool, limit: bool) -> int:
        with dry_run(2, accelerator=accelerator):
            blocks = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
            model = FullyShardedDataParallel(
                blocks, auto_wrap_policy={nn.Linear}, join_units_below=0, limit_all_gathers=limit
            )
            return memory_plan(model).unsharded_peak // (4 * 64 * 64)

    assert peak(accelerator=False, limit=False) == 2
    assert peak(accelerator=True, limit=True) == 2
    assert peak(accelerator=True, limit=False) == 6
    assert not wait_limits.issued, "the watch would report a rank that hangs"


def test_it_refuses_in_words() -> None:
    with pytest.raises(ConfigValueError, match="0 <= rank < ranks, found rank 4 of 4"), dry_run(4, rank=4):
        pass
    with fake_world(2):
        with pytest.raises(UsageError, match="is already a rank of a job"), dry_run(4):
            pass
        model = FullyShardedDataParallel(nn.Linear(2, 2))
        with pytest.raises(UsageError, match=r"inside dry_run\(\)"):
            memory_plan(model)
    with dry_run(2):
        model = FullyShardedDataParallel(nn.Linear(2, 2))
        with pytest.raises(ConfigValueError, match="microbatches of at least 1, found 0"):
            memory_plan(model, microbatches=0)
        with pytest.raises(UsageError, match="a step of LBFGS fails on tensors without values"):
            memory_plan(model, torch.optim.LBFGS(model.parameters()))
