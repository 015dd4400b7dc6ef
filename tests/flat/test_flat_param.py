"""A flat parameter between its uses."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import InternalError
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process


def test_the_unsharded_form_that_is_not_there_is_refused_by_its_units_name() -> None:
    with fake_world(2):
        inner = FullyShardedDataParallel(nn.Linear(3, 2), use_orig_params=True)
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 3), inner), use_orig_params=True)
        model(torch.ones(1, 3))
        handle = inner._handle
        assert handle.unsharded.buffer is None
        with pytest.raises(InternalError, match=re.escape("unit '1': 'flat' of the unsharded parameters weight, bias")):
            _ = handle.unsharded.flat


class Lists(nn.Linear):
    """Records the names of the parameters that it lists in its forwards and backwards."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: list[list[str]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look()
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(self.look)
        return output * 2

    def look(self, grad: object = None) -> None:
        self.seen.append([name for name, _ in self.named_parameters()])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_modules_list_the_flat_parameter_except_while_they_compute(strategy: str) -> None:
    with fake_world(2):
        net = Lists()
        model = FullyShardedDataParallel(nn.Sequential(net), auto_wrap_policy={Lists}, sharding_strategy=strategy)
        flat, whole = ["_flat_param"], ["weight", "bias"]
        for _ in range(2):
            net.look()
            loss = model(torch.ones(2, 4)).sum()
            net.look()
            loss.backward()
            assert net.seen == [flat, whole, flat, whole]
            net.seen.clear()
        model[0].unshard()
        net.look()
        with torch.no_grad():
            model(torch.ones(2, 4))
        net.look()
        assert net.seen == [flat, whole, flat]
