"""torch's `set_state_dict` where one rank shows its effect."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from flatfsdp import FullyShardedDataParallel
from flatfsdp.wrap import ModuleWrapPolicy
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

each_way = pytest.mark.parametrize(
    ("orig", "flattened"), [(True, True), (True, False), (False, True), (False, False)], ids=str
)


class Tied(nn.Module):
    """A parameter that modules of two units hold; the inner one's owns it, under the second of its names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def wrapped(net: nn.Module, orig: bool) -> FullyShardedDataParallel:
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(net, auto_wrap_policy=policy, use_orig_params=orig, join_units_below=0)


def check(net: nn.Module, x: torch.Tensor, model: FullyShardedDataParallel, flattened: bool) -> None:
    """An optimizer of `model` loads the state that one of `net`, which is not wrapped, has after a step."""
    optim, loaded = torch.optim.Adam(net.parameters()), torch.optim.Adam(model.parameters())
    net(x).sum().backward()
    optim.step()
    expected: Any = dcp_state.get_optimizer_state_dict(net, optim)["state"]
    options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=flattened)
    state = dcp_state.get_optimizer_state_dict(net, optim, options=options)
    importlib.reload(dcp_state)  # as the first call of a program finds it
    dcp_state.set_optimizer_state_dict(model, loaded, state, options=options)
    found = FullyShardedDataParallel.full_optim_state_dict(model, loaded)["state"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name]["exp_avg"], states["exp_avg"]) for name, states in expected.items())


@each_way
def test_a_tied_parameter_of_two_units(orig: bool, flattened: bool) -> None:
    net = Tied()
    with fake_world(1):
        model = wrapped(Tied(), orig)
        check(net, torch.tensor([1, 3]), model, flattened)
        options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        dcp_state.set_model_state_dict(model, net.state_dict(), options=options)
        assert all(map(torch.equal, model.state_dict().values(), net.state_dict().values()))


@each_way
def test_a_unit_that_a_checkpoint_holds(orig: bool, flattened: bool) -> None:
    with fake_world(1):
        model = wrapped(nn.Sequential(checkpoint_wrapper(nn.Linear(2, 3)), nn.Linear(3, 1)), orig)
        check(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), torch.ones(4, 2), model, flattened)


@each_way
def test_a_unit_that_holds_a_checkpoint(orig: bool, flattened: bool) -> None:
    with fake_world(1):
        unit = FullyShardedDataParallel(checkpoint_wrapper(nn.Linear(2, 3)), use_orig_params=orig)
        model = FullyShardedDataParallel(nn.Sequential(unit, nn.Linear(3, 1)), use_orig_params=orig)
        check(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), torch.ones(4, 2), model, flattened)
