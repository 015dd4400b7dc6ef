"""Experts that lie on a mesh of their own, in units nested in units over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import flatfsdp
from flatfsdp import FullyShardedDataParallel
from tests.conftest import Run
from tests.harness.experts import Mixture, divide, loss_on
from tests.harness.tensor_parallel import seeded

pytestmark = pytest.mark.distributed


def wrapped(rank: int, world: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    net = divide(seeded(Mixture), mesh["ep"])
    for block in net.blocks:
        block.experts = FullyShardedDataParallel(block.experts, device_mesh=mesh["efsdp"], use_orig_params=True)
    return FullyShardedDataParallel(net, use_orig_params=True)


def in_place(rank: int, world: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    over_all = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    net = divide(seeded(Mixture), mesh["ep"])
    for block in net.blocks:
        flatfsdp.fully_shard(block.experts, mesh=mesh["efsdp"])
        flatfsdp.fully_shard(block, mesh=over_all)
    flatfsdp.fully_shard(net, mesh=over_all)
    return net


def trained(rank: int, world: int, front: str) -> list[str]:
    """Gradients are summed over all ranks, each with its factor; against one process."""
    model = wrapped(rank, world) if front == "wrapper" else in_place(rank, world)
    one = seeded(Mixture)
    for each in model.modules():
        if isinstance(each, FullyShardedDataParallel) or hasattr(each, "set_gradient_divide_factor"):
            each.set_gradient_divide_factor(1.0)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, one)]
    lines = []
    for step in range(3):
        loss = loss_on(model, step, rank, world)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        expected = 0.0
        for place in range(world):
            share = loss_on(one, step, place, world)
            share.backward()
            expected += share.item()
        if abs(total.item() - expected) > 2e-6:
            lines.append(f"step {step}: loss {total.item()}, expected {expected}")
        if front == "wrapper":
            norm, wanted = model.clip_grad_norm_(1e9), torch.nn.utils.get_total_norm([p.grad for p in one.parameters()])
            if not torch.allclose(norm, wanted, rtol=1e-5):
                lines.append(f"step {step}: norm {norm}, expected {wanted}")
        for each in optimizers:
            each.step()
            each.zero_grad()
    if front == "wrapper":
        with FullyShardedDataParallel.state_dict_type(model, "FULL"):
            values = model.state_dict()
            states = FullyShardedDataParallel.optim_state_dict(model, optimizers[0])["state"]
    else:
        values = {n: p.full_tensor() for n, p in model.named_parameters() if isinstance(p, DTensor)}
        states = {}
    for name, parameter in one.named_parameters():
        if not torch.allclose(values[name], parameter, rtol=1e-5, atol=2e-6):
            lines.append(f"{name}: off by {(values[name] - parameter).abs().max()}")
        momentum = optimizers[1].state[parameter]["momentum_buffer"]
        if states and not torch.allclose(states[name]["momentum_buffer"], momentum, rtol=1e-5, atol=2e-6):
            lines.append(f"{name}: another momentum")
    return lines


@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_experts_train_as_in_one_process(pool4: Run, front: str) -> None:
    assert not [line for lines in pool4(trained, front) for line in lines]
