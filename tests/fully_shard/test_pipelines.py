"""Schedules of torch.distributed.pipelining over stages of `fully_shard`, with and without `as_torch`: like one
process."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed import pipelining

import flatfsdp
from flatfsdp import FSDPModule, as_torch
from tests.conftest import Run
from tests.harness.thorough import spread

pytestmark = pytest.mark.distributed

STAGES = {
    "ScheduleGPipe": 2, "Schedule1F1B": 2, "ScheduleInterleaved1F1B": 4, "ScheduleLoopedBFS": 4,
    "ScheduleInterleavedZeroBubble": 4, "ScheduleZBVZeroBubble": 4, "ScheduleDualPipeV": 4,
}  # fmt: skip
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # a rank's second stage is as far from the last as its first
BLOCKS, ROWS, LR = 4, 8, 0.01


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(BLOCKS)]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def batch(step: int, replica: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return [torch.randn(ROWS, 6, generator=generator) for _ in range(2)]


def staged(mesh: Any, made: list[nn.Module], name: str, front: Any, **options: Any) -> dict[int, nn.Module]:
    """The stages of this rank by their numbers, each sharded over its replicas by `front`."""
    found, stages, rank = {}, STAGES[name], mesh["pp"].get_local_rank()
    each = BLOCKS // stages
    for number in (rank, stages - 1 - rank) if name in V_SHAPED else range(rank, stages, 2):
        module = nn.Sequential(*made[number * each : (number + 1) * each])
        for block in module:
            front.fully_shard(block, mesh=mesh["dp"], **options)
        found[number] = front.fully_shard(module, mesh=mesh["dp"], **options)
    return found


def piped(rank: int, world: int, name: str, *, installed: bool, **options: Any) -> list[str]:
    warnings.simplefilter("ignore")
    if not installed:
        return _piped(name, flatfsdp, **options)
    as_torch.install()
    try:
        return _piped(name, fsdp, **options)
    finally:
        as_torch.uninstall()


def _piped(name: str, front: Any, **options: Any) -> list[str]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    made, lines = blocks(), []
    alone, stages = nn.Sequential(*copy.deepcopy(made)), STAGES[name]
    modules = staged(mesh, made, name, front, **options)
    if not all(isinstance(module, FSDPModule) for module in modules.values()):
        lines.append("these are torch's")
    parts: Any = [
        pipelining.PipelineStage(module, number, stages, torch.device("cpu"), group=mesh.get_group("pp"))
        for number, module in modules.items()
    ]
    schedule = getattr(pipelining, name)(
        parts if stages > 2 else parts[0], n_microbatches=4, loss_fn=loss_of, scale_grads=False
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=LR) for each in (alone, *modules.values())]
    replica = mesh["dp"].get_local_rank()
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs, target = batch(step, replica)
        schedule.step(*[inputs] * (0 in modules), **{"target": target} if stages - 1 in modules else {})
        for other in range(2):
            inputs, target = batch(step, other)
            (loss_of(alone(inputs), target) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    whole = dict(zip(range(stages), _cut(alone, stages), strict=True))
    for number, module in modules.items():
        for (path, found), expected in zip(module.named_parameters(), whole[number].parameters(), strict=True):
            value: Any = found
            if not torch.allclose(value.full_tensor(), expected, rtol=0, atol=1e-6):
                lines.append(f"stage {number}: {path} is another one")
    return lines


def _cut(model: nn.Sequential, stages: int) -> list[nn.Module]:
    each = BLOCKS // stages
    return [nn.Sequential(*model[number * each : (number + 1) * each]) for number in range(stages)]


@pytest.mark.parametrize(("installed", "name"), spread((True, False), STAGES))
def test_like_one_process(name: str, installed: bool, pool4: Run) -> None:
    assert pool4(piped, name, installed=installed, timeout=60) == [[]] * 4


@pytest.mark.parametrize("reshard", [True, False])
def test_split_backwards_like_one_process_whatever_is_kept(reshard: bool, pool4: Run) -> None:
    found = pool4(piped, "ScheduleZBVZeroBubble", installed=True, reshard_after_forward=reshard, timeout=60)
    assert found == [[]] * 4
