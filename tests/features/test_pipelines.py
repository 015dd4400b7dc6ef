"""torch.distributed.pipelining, imported when there are models already, and run on: in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

PROGRAM = """
import sys
import torch, torch.distributed as dist
import flatfsdp

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
module = torch.nn.Linear(3, 2, bias=False)
model = flatfsdp.fully_shard(module) if "front" in sys.argv else flatfsdp.FullyShardedDataParallel(module)
flatfsdp.fully_shard(torch.nn.Linear(3, 2))
model(torch.ones(4, 3)).sum().backward()
model.zero_grad()
assert "torch.distributed.pipelining.stage" not in sys.modules
from torch.distributed.pipelining import stage
inputs = torch.ones(4, 3, requires_grad=True)
output = model(inputs)
of_inputs, left = stage.stage_backward_input([output], [torch.ones_like(output)], [inputs], iter(model.parameters()))
assert of_inputs[0].shape == (4, 3) and left == []
(grad,) = (each.grad for each in model.parameters())
grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
print("gradients", grad.flatten().tolist(), sum(type(each).__module__.endswith("pipelines") for each in sys.meta_path))
"""


@pytest.mark.parametrize("front", ["front", "wrapper"])
def test_stages_know_units_of_models_that_were_there_before(front: str) -> None:
    """torch's function would leave the gradients of the parameters for later, and find none."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, front], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == f"gradients {[4.0] * 6} 1"
