"""Weights of four bits in the form of bitsandbytes, sharded between the blocks that share a scale: modules compute with
the bits of one process."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp.layout import declared
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import seeded

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
]

BLOCK = 64 // 2  # bytes of the elements that share a scale


class Layer(nn.Module):
    """A frozen weight in NF4, and a trainable bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        its: Any = importlib.import_module("bitsandbytes.nn")
        options = {"bias": False, "compute_dtype": torch.float32, "quant_type": "nf4"}
        self.base = its.Linear4bit(inputs, outputs, **options).to("cpu")  # which quantizes it
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.bias)


def net() -> nn.Sequential:
    return nn.Sequential(Layer(64, 48), Layer(48, 32))


def trained(rank: int, world: int) -> list[tuple[int, int]]:
    """The bytes of each weight that this rank has. Two equal batches have the gradients of one, to the bit."""
    alone = seeded(net)
    model = FSDP(seeded(net), auto_wrap_policy={Layer}, use_orig_params=True, layout=declared)
    x = torch.linspace(-1, 1, 2 * 64).view(2, 64)
    ours, one = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, alone))
    for _ in range(3):
        losses = [each(x).square().sum() for each in (model, alone)]
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, (ours, one), strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    held = []
    for layer in model.module:
        flats = [each for each in inspect.unit(layer).flat_params if each.layout.params[0].name == "base.weight"]
        (layout,) = (each.layout for each in flats)
        span = layout.span_in_param(0, rank)
        held.append((span.start, span.stop))
    return held


def test_four_bits_are_cut_between_blocks(pool2: Run) -> None:
    held = pool2(trained)
    for layer, total in enumerate((64 * 48 // 2, 48 * 32 // 2)):
        spans = [of_rank[layer] for of_rank in held]
        assert spans[0][0] == 0 and spans[-1][1] == total
        assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
        assert all(start % BLOCK == 0 and start < stop for start, stop in spans)
