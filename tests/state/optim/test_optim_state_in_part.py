"""Optimizer state dicts without entries that FSDP1 does not require: param groups, and parameters outside of units."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Torchs

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import OptimStateKeyType
from tests.conftest import Run
from tests.harness.corners import joined

pytestmark = pytest.mark.distributed


class Recommender(nn.Module):
    """A wrapped part, and one that each rank keeps to itself under a name of its own."""

    def __init__(self, kind: Any, own: str, *, orig: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"device_id": torch.device("cpu")} if kind is Torchs else {}
        self.dense = kind(nn.Linear(6, 5), use_orig_params=orig, **options)
        self.add_module(f"sparse{own}", nn.Linear(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x


def stepped(kind: Any, own: str, orig: bool) -> tuple[Any, torch.optim.Optimizer]:
    model = Recommender(kind, own, orig=orig)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    optim.step()
    return model, optim


def plain(value: Any, *, shapes: bool) -> Any:
    """`value` with lists in place of tensors, or their shapes, for comparing."""
    if isinstance(value, torch.Tensor):
        return value.shape if shapes else [round(each, 6) for each in value.flatten().tolist()]
    if isinstance(value, dict):
        return {str(key): plain(each, shapes=shapes) for key, each in value.items()}
    return [plain(each, shapes=shapes) for each in value] if isinstance(value, list) else value


def in_part(rank: int, world: int) -> list[str]:
    warnings.simplefilter("ignore")
    lines = []
    for orig in (True, False):
        found = {}
        for kind in (Torchs, FSDP):
            model, optim = stepped(kind, "", orig)
            whole = kind.optim_state_dict(model, optim)
            saved = {"state": whole["state"]}
            steps: dict[str, Any] = {"saved": copy.deepcopy(saved)}
            if kind is FSDP:  # FSDP1 takes such only from optimizers that go by names
                saved = FSDP.optim_state_dict(model, optim, {"state": optim.state_dict()["state"]})
                steps["saved"] = copy.deepcopy(saved)
            loadable = kind.optim_state_dict_to_load(model, optim, copy.deepcopy(saved))
            steps["loadable"] = loadable
            dense = {name: each for name, each in whole["state"].items() if "sparse" not in name}
            steps["of the units"] = kind.optim_state_dict_to_load(
                model, optim, {"state": copy.deepcopy(dense), "param_groups": whole["param_groups"]}
            )
            # On a CPU FSDP1 gathers one state of original parameters into the memory of another.
            found[kind] = plain(steps, shapes=orig)
        for what, expected in found[Torchs].items():
            if found[FSDP][what] != expected:
                lines.append(f"orig {orig}, {what}: {found[FSDP][what]} where FSDP1 has {expected}")
        # Parameters that the dict does not list either: FSDP1's result fails in torch's load_state_dict().
        groups = [
            {**each, "params": [n for n in each["params"] if "sparse" not in n]} for each in whole["param_groups"]
        ]
        groups[0]["lr"] = 0.5
        FSDP.optim_state_dict_to_load(model, optim, {"state": dense, "param_groups": groups}, load_directly=True)
        if optim.param_groups[0]["lr"] != 0.5 or len(optim.param_groups[0]["params"]) != len([*model.parameters()]):
            lines.append(f"orig {orig}: loaded in part: {optim.param_groups}")
        # FSDP1 knows parameters of one rank alone only in optimizers that go by names.
        other, fresh = stepped(FSDP, str(rank), orig)
        fresh.param_groups[0]["lr"] = 0.25
        saved = FSDP.optim_state_dict(other, fresh, {"state": fresh.state_dict()["state"]})
        if {name.partition(".")[0] for name in saved["state"]} != {"dense", f"sparse{rank}"}:
            lines.append(f"orig {orig}: {saved['state'].keys()}")
        saved = {"state": {name: each for name, each in saved["state"].items() if "sparse" not in name or rank}}
        FSDP.optim_state_dict_to_load(other, fresh, saved, load_directly=True)
        if fresh.param_groups[0]["lr"] != 0.25 or not fresh.state_dict()["state"]:
            lines.append(f"orig {orig}: loaded without groups: {fresh.param_groups}")
    alone = nn.Linear(3, 2)
    numbered = {"state": {0: {"step": 1}, 1: {"step": 2}}}
    named = FSDP.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, alone)
    if named != {"state": {"weight": {"step": 1}, "bias": {"step": 2}}}:
        lines.append(f"rekeyed: {named}")
    return lines


def test_without_param_groups_and_without_parameters_of_no_unit(pool2: Run) -> None:
    assert not joined(pool2(in_part))
