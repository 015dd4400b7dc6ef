"""State dicts to and from torch's own FSDP1: the same keys and values, in each of its types."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Torchs
from torch.distributed.fsdp import ShardingStrategy as TorchsStrategy
from torch.distributed.fsdp import StateDictType as TorchsType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchsPolicy

from flatfsdp import FullyShardedDataParallel, LocalStateDictConfig, ShardedStateDictConfig
from flatfsdp.engine.config import fsdp1_mode
from flatfsdp.wrap import ModuleWrapPolicy
from tests.conftest import Run
from tests.harness.corners import Setting, joined
from tests.harness.models import CASES
from tests.harness.thorough import some, spread

pytestmark = pytest.mark.distributed

as_type = FullyShardedDataParallel.state_dict_type
# FSDP1 flattens one dtype and one trainability per unit, and knows neither channels_last nor scalars.
NAMES = ("mlp", "transformer", "tied")


def torchs(module: nn.Module, units: Any, *, orig: bool) -> Any:
    return Torchs(
        module, auto_wrap_policy=TorchsPolicy(set(units)), use_orig_params=orig, device_id=torch.device("cpu")
    )


def changed(build: Any) -> nn.Module:
    model: nn.Module = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2)
    return model


def unlike(found: Any, expected: Any, what: str) -> list[str]:
    if set(found) != set(expected):
        return [f"{what}: keys {sorted(set(found) ^ set(expected))}"]
    return [f"{what}: {name}" for name, value in expected.items() if not torch.equal(found[name], value)]


def exchanged(rank: int, world: int, name: str) -> list[str]:
    case = CASES[name]
    lines = []
    for number, kind in enumerate(TorchsType):
        for orig in some((True, False), 2, NAMES.index(name) + number):
            what = f"{kind.name}, orig {orig}"
            theirs = torchs(changed(case.build), case.units, orig=orig)
            ours = Setting("FULL_SHARD", orig).wrap(case.build(), case.units)
            expected = changed(case.build).state_dict()
            config = {
                "LOCAL_STATE_DICT": LocalStateDictConfig(sharded_as="sharded_tensor"),
                "SHARDED_STATE_DICT": ShardedStateDictConfig(sharded_as="sharded_tensor"),
            }.get(kind.name)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch's, of its own ShardedTensor
                with Torchs.state_dict_type(theirs, kind), as_type(ours, kind, config):
                    state = theirs.state_dict()
                    ours.load_state_dict(state)
                    mine = ours.state_dict()
                lines += unlike(ours.state_dict(), expected, f"{what}, read")
                if orig and kind is TorchsType.LOCAL_STATE_DICT:
                    continue  # torch's own has each parameter twice, and it wants both
                if set(mine) != set(state):
                    lines.append(f"{what}: keys {sorted(set(mine) ^ set(state))}")
                again = torchs(case.build(), case.units, orig=orig)
                with Torchs.state_dict_type(again, kind):
                    again.load_state_dict(mine)
                with Torchs.state_dict_type(again, TorchsType.FULL_STATE_DICT):
                    lines += unlike(again.state_dict(), expected, f"{what}, written")
    return lines


@pytest.mark.parametrize(("world", "name"), spread([3, 2], NAMES))
def test_state_dicts_are_exchanged_with_torchs_fsdp1(run: Run, world: int, name: str) -> None:
    assert not joined(run(world, exchanged, name))


# --- containers of sharded values -------------------------------------------------------------------------------------


def text(value: Any) -> Any:
    """The class of a value, the place of this rank's part of it, and its elements."""
    kind = type(value).__name__
    if kind == "DTensor":
        return (
            kind,
            tuple(value.shape),
            str(value.placements),
            value.device_mesh.mesh.tolist(),
            value.to_local().tolist(),
        )
    if kind == "ShardedTensor":
        shards = [(s.metadata.shard_offsets, s.metadata.shard_sizes, s.tensor.tolist()) for s in value.local_shards()]
        return kind, tuple(value.size()), shards
    return kind, tuple(value.shape), value.tolist()


def carried(rank: int, world: int, strategy: str, meshed: bool, orig: bool) -> list[str]:
    warnings.simplefilter("ignore")
    case = CASES["mlp"]
    mesh = None
    if meshed:
        shape = (world // 2, 2) if "HYBRID" in strategy else (world,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    options: dict[str, Any] = {"use_orig_params": orig, "device_mesh": mesh}
    theirs: Any = Torchs(
        changed(case.build),
        sharding_strategy=TorchsStrategy[strategy],
        auto_wrap_policy=TorchsPolicy(set(case.units)),
        device_id=torch.device("cpu"),
        **options,
    )
    ours = FullyShardedDataParallel(
        changed(case.build), sharding_strategy=strategy, auto_wrap_policy=ModuleWrapPolicy(set(case.units)), **options
    )
    lines = []
    found: dict[str, dict[str, Any]] = {}
    with patch.object(fsdp1_mode, "active", True):
        for who, kind, model in (("FSDP1", Torchs, theirs), ("ours", FullyShardedDataParallel, ours)):
            optim = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optim.step()
            with kind.state_dict_type(model, "SHARDED_STATE_DICT" if who == "ours" else TorchsType.SHARDED_STATE_DICT):
                state, states = model.state_dict(), kind.optim_state_dict(model, optim)
                older = kind.sharded_optim_state_dict(model, optim)
            values = {name: text(value) for name, value in state.items()}
            if not meshed:  # FSDP1 refuses this
                with kind.state_dict_type(model, "LOCAL_STATE_DICT" if who == "ours" else TorchsType.LOCAL_STATE_DICT):
                    local = model.state_dict()
                    if who == "ours":
                        model.load_state_dict(local)
                # For original parameters FSDP1 adds 1-D shards, and cannot load its own dict.
                if not orig or strategy == "NO_SHARD":
                    values |= {f"local {name}": text(value) for name, value in local.items()}
            for what, dicts in (("optim", states), ("sharded optim", older)):
                each = dicts["state"]
                values |= {f"{what} {name}": text(value["momentum_buffer"]) for name, value in each.items()}
            found[who] = values
            if who == "ours":
                with kind.state_dict_type(model, "SHARDED_STATE_DICT"):
                    model.load_state_dict(state)
                    kind.optim_state_dict_to_load(model, optim, states, load_directly=True)
    for name in sorted(found["FSDP1"].keys() | found["ours"].keys()):
        expected, mine = found["FSDP1"].get(name), found["ours"].get(name)
        # States of replicated flat parameters FSDP1 splits, those of replicated original parameters it does not.
        if expected != mine and (orig or strategy != "NO_SHARD" or "optim" not in name):
            lines.append(f"{strategy}, mesh {meshed}, orig {orig}: {name}: {mine} where FSDP1 has {expected}"[:400])
    return lines


@pytest.mark.parametrize(
    ("world", "strategy", "meshed"),
    [(2, "FULL_SHARD", False), (2, "SHARD_GRAD_OP", True), (2, "NO_SHARD", False), (4, "HYBRID_SHARD", True)],
)
def test_under_as_torch_fsdp1s_classes_carry_sharded_values(run: Run, world: int, strategy: str, meshed: bool) -> None:
    for orig in (True, False):
        assert not joined(run(world, carried, strategy, meshed, orig))
