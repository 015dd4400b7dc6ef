"""torch's `set_state_dict` where one rank shows what it does with a state dict."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from flatfsdp import FullyShardedDataParallel
from flatfsdp.wrap import ModuleWrapPolicy
from tests.harness.fake import fake_world


class Tied(nn.Module):
    """A parameter that modules of two units hold; the inner one's owns it, under the second of its names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}], ids=str)
def test_tied_parameters_of_two_units(orig: bool, options: dict[str, bool]) -> None:
    net = Tied()
    optim = torch.optim.Adam(net.parameters())
    net(torch.tensor([1, 3])).sum().backward()
    optim.step()
    expected = get_optimizer_state_dict(net, optim)["state"]
    state = get_optimizer_state_dict(net, optim, options=StateDictOptions(**options))
    importlib.reload(dcp_state)  # as the first call of a program finds it
    with fake_world(1):
        model = FullyShardedDataParallel(
            Tied(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=orig, join_units_below=0
        )
        loaded = torch.optim.Adam(model.parameters())
        set_optimizer_state_dict(model, loaded, state, options=StateDictOptions(**options))
        found = FullyShardedDataParallel.full_optim_state_dict(model, loaded)["state"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name]["exp_avg"], states["exp_avg"]) for name, states in expected.items())
        broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, net.state_dict(), options=broadcast)
        assert all(map(torch.equal, model.state_dict().values(), net.state_dict().values()))
