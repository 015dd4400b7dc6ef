"""Optimizer state of torch's own FSDP in flatfsdp, and of flatfsdp in torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import ShardedOptimStateDictConfig
from flatfsdp.wrap import ModuleWrapPolicy
from tests.conftest import Run
from tests.harness.corners import Net, Setting, data, joined, loss_of, seeded
from tests.harness.meshes import shared_mesh
from tests.harness.models import Feedforward
from tests.harness.parity import deprecations_allowed
from tests.state.optim.test_optim_state import different

pytestmark = pytest.mark.distributed

Theirs = torch_fsdp.FullyShardedDataParallel
BOTH = (Setting(orig=True), Setting(orig=False))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)


def ours(setting: Setting, rank: int, *, steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    return trained(setting.wrap(seeded(Net), (Feedforward,)), rank, steps)


def trained(model: Any, rank: int, steps: int) -> tuple[Any, torch.optim.Optimizer]:
    optim = adam(model)
    for step in range(steps):
        optim.zero_grad()
        loss_of(model(data(rank, step))).backward()
        optim.step()
    return model, optim


def theirs(orig: bool, rank: int, *, steps: int = 2, mesh: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    """The same training under FSDP1, which sums gradients in another order."""
    more: dict[str, Any] = {"device_mesh": shared_mesh(dist.get_world_size())} if mesh else {}
    policy = ModuleWrapPolicy({Feedforward})
    model = Theirs(seeded(Net), auto_wrap_policy=policy, use_orig_params=orig, device_id=torch.device("cpu"), **more)
    return trained(model, rank, steps)


def whole_of_theirs(model: Any, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """FSDP1's whole state. Without offloading, which on a CPU hands out memory that is freed meanwhile."""
    config = torch_fsdp.FullOptimStateDictConfig(offload_to_cpu=False)
    with Theirs.state_dict_type(model, torch_fsdp.StateDictType.FULL_STATE_DICT, None, config):
        return Theirs.optim_state_dict(model, optim)


def in_order(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "params": sorted(group["params"])} for group in groups]


def exchanged(rank: int, world: int, orig: bool) -> list[str]:
    """The whole state of one goes to the other and comes back as it was; both give the same."""
    lines = []
    with deprecations_allowed():
        for setting in BOTH:
            model, optim = ours(setting, rank)
            mine = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
            other, other_optim = theirs(orig, rank, steps=0)
            other_optim.load_state_dict(Theirs.optim_state_dict_to_load(other, other_optim, copy.deepcopy(mine)))
            back = whole_of_theirs(other, other_optim)
            lines += [f"{setting}, there and back: {line}" for line in different(back["state"], mine["state"])]
            if in_order(back["param_groups"]) != in_order(mine["param_groups"]):
                lines.append(f"{setting}: {back['param_groups']}, not {mine['param_groups']}")
            fresh, fresh_optim = ours(setting, rank, steps=0)
            fresh_optim.load_state_dict(FSDP.shard_full_optim_state_dict(back, fresh, optim=fresh_optim))
            again = FSDP.full_optim_state_dict(fresh, fresh_optim, rank0_only=False)
            lines += [f"{setting}, back here: {line}" for line in different(again["state"], mine["state"])]
            scattered = FSDP.scatter_full_optim_state_dict(back if rank == 0 else None, fresh, optim=fresh_optim)
            if list(different(scattered["state"], fresh_optim.state_dict()["state"])):
                lines.append(f"{setting}: scattered")
    return lines


@pytest.mark.parametrize("orig", [True, False])
def test_whole_states_go_to_fsdp1_and_back(orig: bool, pool2: Run) -> None:
    assert not joined(pool2(exchanged, orig))


def read_sharded(rank: int, world: int, orig: bool, mesh: bool) -> list[str]:
    """Sharded and whole states of FSDP1 are the same to us."""
    lines = []
    with deprecations_allowed():
        other, other_optim = theirs(orig, rank, mesh=mesh)
        whole = whole_of_theirs(other, other_optim)
        Theirs.set_state_dict_type(
            other,
            torch_fsdp.StateDictType.SHARDED_STATE_DICT,
            None,
            torch_fsdp.ShardedOptimStateDictConfig(_use_dtensor=mesh),
        )
        sharded = Theirs.optim_state_dict(other, other_optim)
        kinds = {type(v).__name__ for entry in sharded["state"].values() for v in entry.values()}
        assert ("DTensor" if mesh else "ShardedTensor") in kinds, kinds
        for setting in BOTH:
            model, optim = ours(setting, rank, steps=0)
            optim.load_state_dict(FSDP.flatten_sharded_optim_state_dict(sharded, model, optim))
            found = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
            lines += [f"{setting}: {line}" for line in different(found["state"], whole["state"])]
    return lines


@pytest.mark.parametrize("mesh", [False, True])
@pytest.mark.parametrize("orig", [True, False])
def test_sharded_states_of_fsdp1(orig: bool, mesh: bool, pool2: Run) -> None:
    assert not joined(pool2(read_sharded, orig, mesh))


def as_rows(rank: int, world: int, carrier: str) -> list[str]:
    """Rows in torch's classes, which FSDP1 reads."""
    lines = []
    with deprecations_allowed():
        model, optim = ours(BOTH[0], rank)
        whole = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        config = ShardedOptimStateDictConfig(sharded_as=carrier)
        with FSDP.state_dict_type(model, "SHARDED", None, config):
            rows = FSDP.optim_state_dict(model, optim)
            kinds = {type(v).__name__ for entry in rows["state"].values() for k, v in entry.items() if k != "step"}
            if kinds != {"DTensor" if carrier == "dtensor" else "ShardedTensor"}:
                lines.append(f"found {kinds}")
            fresh, fresh_optim = ours(BOTH[1], rank, steps=0)
            FSDP.optim_state_dict_to_load(fresh, fresh_optim, rows, load_directly=True)
        found = FSDP.full_optim_state_dict(fresh, fresh_optim, rank0_only=False)
        lines += list(different(found["state"], whole["state"]))
        other, other_optim = theirs(True, rank, steps=0)
        loadable = Theirs.flatten_sharded_optim_state_dict(rows, other, other_optim)
        other_optim.load_state_dict(loadable)
        found = whole_of_theirs(other, other_optim)
        lines += [f"FSDP1: {line}" for line in different(found["state"], whole["state"])]
    return lines


@pytest.mark.parametrize("carrier", ["sharded_tensor", "dtensor"])
def test_rows_in_torchs_classes(carrier: str, pool2: Run) -> None:
    assert not joined(pool2(as_rows, carrier))
