"""Staging copies in exchanges of rows: none of large parameters, and of small ones only if ranks share no memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.engine.cpu.groups import over_gloo
from tests.conftest import Run

pytestmark = pytest.mark.distributed

WIDTH = 192
NORMS = 2 * WIDTH  # elements, and all small parameters


class Layer(nn.Module):
    """Of a transformer: seven matrices and two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.gate = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.before, self.after = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for each in self.square:
            x = each(x)
        return self.down(self.up(self.after(x)) * self.gate(x))


def staged(rank: int, world: int, gloo: bool, compute: torch.dtype | None) -> tuple[int, int, int]:
    """Bytes that a step stages, those that it gathers, and those that a state dict stages."""
    with over_gloo() if gloo else nullcontext():
        torch.manual_seed(0)
        mixed = MixedPrecision(param_dtype=compute, reduce_dtype=torch.float32)
        model = FullyShardedDataParallel(Layer(), use_orig_params=True, layout="rows", mixed_precision=mixed)
        figures = flatfsdp.stats(model)
        for _ in range(2):  # in the first one ranks compare their models
            figures.reset()
            model(torch.ones(2, WIDTH)).sum().backward()
        step, gathered = figures.bytes_staged, figures.comm["all_gather"][1]
        figures.reset()
        model.state_dict()
        return step, gathered, figures.bytes_staged


@pytest.mark.parametrize("compute", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_only_small_parameters_are_staged(world: int, compute: torch.dtype | None, run: Run) -> None:
    size = 4 if compute is None else 2
    elements = sum(parameter.numel() for parameter in Layer().parameters())  # all sizes are multiples of 2 and 3 rows
    for gloo, copied in ((False, 0), (True, NORMS)):
        for found in run(world, staged, gloo, compute):
            assert found == (copied * (size + 4), elements * size, copied * 4)
