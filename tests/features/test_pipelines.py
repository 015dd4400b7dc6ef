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
fronts = flatfsdp.fully_shard, flatfsdp.FullyShardedDataParallel
models = [shard(torch.nn.Linear(3, 2, bias=False)) for shard in fronts]
for model in models:
    model(torch.ones(4, 3)).sum().backward()
    model.zero_grad()
assert "torch.distributed.pipelining.stage" not in sys.modules
from torch.distributed.pipelining import stage
for model in models:
    inputs = torch.ones(4, 3, requires_grad=True)
    output = model(inputs)
    of_inputs, left = stage.stage_backward_input(
        [output], [torch.ones_like(output)], [inputs], iter(model.parameters())
    )
    assert of_inputs[0].shape == (4, 3) and left == []
    (grad,) = (each.grad for each in model.parameters())
    grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    print("gradients", grad.flatten().tolist())
print("finders", sum(type(each).__module__.endswith("pipelines") for each in sys.meta_path))
"""


def test_stages_know_units_of_models_that_were_there_before() -> None:
    """torch's function would leave the gradients of the parameters for later, and find none."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-3:] == [f"gradients {[4.0] * 6}"] * 2 + ["finders 1"]
