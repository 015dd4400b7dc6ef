"""torch.distributed.pipelining, imported when there are models already, and run on: in a process of its own."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flatfsdp
from tests.harness import fresh

pytestmark = pytest.mark.process

STAGE = "torch.distributed.pipelining.stage"


def late(rank: int, world: int) -> tuple[list[list[float]], int]:
    """The gradients of each front, and the number of our finders of modules."""
    sys.modules.pop(STAGE, None)  # as in a program that has not imported it yet
    dist.init_process_group("gloo")
    fronts: list[Any] = [flatfsdp.fully_shard, flatfsdp.FullyShardedDataParallel]
    models = [shard(torch.nn.Linear(3, 2, bias=False)) for shard in fronts]
    for model in models:
        model(torch.ones(4, 3)).sum().backward()
        model.zero_grad()
    assert STAGE not in sys.modules
    stage = importlib.import_module(STAGE)
    gradients = []
    for model in models:
        inputs = torch.ones(4, 3, requires_grad=True)
        output = model(inputs)
        of_inputs, left = stage.stage_backward_input(
            [output], [torch.ones_like(output)], [inputs], iter(model.parameters())
        )
        assert of_inputs[0].shape == (4, 3) and left == []
        (grad,) = (each.grad for each in model.parameters())
        gradients.append((grad.full_tensor() if hasattr(grad, "full_tensor") else grad).flatten().tolist())
    return gradients, sum(type(each).__module__.endswith("pipelines") for each in sys.meta_path)


def test_stages_know_units_of_models_that_were_there_before() -> None:
    """torch's function would leave the gradients of the parameters for later, and find none."""
    (rank,) = fresh.run(1, late)
    assert rank.result == ([[4.0] * 6] * 2, 1), rank
