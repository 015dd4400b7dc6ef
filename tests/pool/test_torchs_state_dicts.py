"""State dicts to and from torch's own FSDP1: the same keys and values, in each of its types."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Torchs
from torch.distributed.fsdp import StateDictType as TorchsType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchsPolicy

from flatfsdp import FullyShardedDataParallel, LocalStateDictConfig, ShardedStateDictConfig
from tests.conftest import Run
from tests.harness.models import CASES
from tests.pool.corners import Setting, joined

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
    for orig in (True, False):
        for kind in TorchsType:
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [2, 3])
def test_state_dicts_are_exchanged_with_torchs_fsdp1(run: Run, world: int, name: str) -> None:
    assert not joined(run(world, exchanged, name))
