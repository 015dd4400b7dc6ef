"""Optimizer states of models of which some parameters never had a gradient: they have no state after any way of
saving and loading, and training continues as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import OptimStateKeyType, StateDictType
from tests.conftest import Run
from tests.flat.test_unused import Net, Part, adam, backward, data
from tests.harness.gradients import fill, names_of, together

pytestmark = pytest.mark.distributed

State = dict[str, Any]
Way = Callable[[int, Any, torch.optim.Optimizer, torch.optim.Optimizer], State]  # the state for the second optimizer


def of_kind(kind: str) -> Way:
    def go_on(rank: int, model: Any, old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> State:
        with FSDP.state_dict_type(model, StateDictType[kind]):
            return FSDP.optim_state_dict_to_load(model, new, FSDP.optim_state_dict(model, old))

    return go_on


def scattered(rank: int, model: Any, old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> State:
    whole = FSDP.full_optim_state_dict(model, old)
    return FSDP.scatter_full_optim_state_dict(whole if rank == 0 else None, model, optim=new)


def rekeyed(rank: int, model: Any, old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> State:
    whole = FSDP.full_optim_state_dict(model, old, rank0_only=False)
    numbered = FSDP.rekey_optim_state_dict(whole, OptimStateKeyType.PARAM_ID, Net())
    named = FSDP.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, Net())
    return FSDP.shard_full_optim_state_dict(named, model, optim=new)


def flattened(rank: int, model: Any, old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> State:
    return FSDP.flatten_sharded_optim_state_dict(FSDP.sharded_optim_state_dict(model, old), model, new)


def torchs_own(rank: int, model: Any, old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> State:
    return copy.deepcopy(old.state_dict())


WAYS: dict[str, Way] = {
    **{kind: of_kind(kind) for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")},
    "scattered": scattered,
    "rekeyed": rekeyed,
    "flattened": flattened,
    "torch's own": torchs_own,
}


def gone_on(rank: int, world: int, orig: bool) -> list[str]:
    texts = []
    for way, state_for in WAYS.items():
        torch.manual_seed(0)
        alone, net = Net(), Net()
        net.load_state_dict(alone.state_dict())
        names = names_of(net)
        model = FSDP(net, auto_wrap_policy={Part}, use_orig_params=orig)
        mine, reference = adam(model.parameters()), adam(alone.parameters())

        # The right head gets gradients from the third step on; the spare parameters never do.
        for step, takes in enumerate(("l", "l", "lr", "l")):
            if step == 2:
                expected = {n for n, p in alone.named_parameters() if p in reference.state}
                found = FSDP.full_optim_state_dict(model, mine, rank0_only=False)["state"].keys()
                if found != expected:
                    texts.append(f"states of {found}, expected {expected}")
                new = adam(model.parameters())
                new.load_state_dict(state_for(rank, model, mine, new))
                mine = new
            mine.zero_grad(), reference.zero_grad()
            backward(model, data(rank, step, 0), takes)
            for each in range(world):
                backward(alone, data(each, step, 0), takes, 1 / world)
            fill(alone, together(model, names))
            mine.step(), reference.step()
        state = model.state_dict()
        for name, parameter in alone.named_parameters():
            if not torch.allclose(state[name], parameter, atol=1e-5):
                texts.append(f"{way}: {name}")
    return texts


@pytest.mark.parametrize("orig", [True, False])
def test_what_has_no_state_has_none_afterwards(pool2: Run, orig: bool) -> None:
    assert pool2(gone_on, orig) == [[], []]
