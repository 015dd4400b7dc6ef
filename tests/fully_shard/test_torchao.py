"""torchao's float8 training, with its float8 all-gather, on a CPU, where torch's `fully_shard` cannot gather float8."""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatfsdp
from tests.conftest import Run
from tests.fully_shard.test_copies import saved
from tests.harness import inspect
from tests.harness.tensor_parallel import mesh_of

pytestmark = pytest.mark.distributed

pytest.importorskip("torchao")

WIDTHS = (32, 64, 32, 16)


def net(*, gathers: bool, meta: bool = False) -> nn.Sequential:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        layers = [nn.Linear(a, b, bias=b == 32) for a, b in itertools.pairwise(WIDTHS)]
        model = nn.Sequential(*(each for layer in layers for each in (layer, nn.ReLU())))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=True)
    converted: nn.Sequential = convert_to_float8_training(model, config=config)
    return converted


def sharded(package: Any, model: nn.Sequential, mesh: Any = None, **settings: Any) -> Any:
    for layer in model[::2]:
        package.fully_shard(layer, mesh=mesh, **settings)
    return package.fully_shard(model, mesh=mesh, **settings)


def losses(model: Any, rank: int, *, scales: bool = False, steps: int = 3, optimizer: Any = None) -> list[float]:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    if scales:
        precompute_float8_dynamic_scale_for_fsdp(model)
    found = []
    for step in range(steps):
        batch = torch.randn(8, 16, WIDTHS[0], generator=torch.Generator().manual_seed(step))[rank]
        loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scales:
            precompute_float8_dynamic_scale_for_fsdp(model)
        found.append(loss.item())
    return found


def beside_torchs(rank: int, world: int, dtype: torch.dtype | None) -> list[Any]:
    """torch gathers in high precision, which torchao casts to the same float8; flatfsdp gathers float8."""
    warnings.simplefilter("ignore")
    found = []
    for package, gathers, scales in ((theirs, False, False), (flatfsdp, True, False), (flatfsdp, True, True)):
        settings = {"mp_policy": package.MixedPrecisionPolicy(dtype, torch.float32)} if dtype else {}
        model = sharded(package, net(gathers=gathers), dist.init_device_mesh("cpu", (world,)), **settings)
        seen = losses(model, rank, scales=scales)
        found.append((seen, [each.full_tensor() for each in model.parameters()]))
    expected, parameters = found[0]
    if dtype is not None:  # torch's casts to that first
        return [f"{seen}, expected {expected}" for seen, _ in found[1:] if seen != pytest.approx(expected, rel=0.2)]
    lines = [f"{seen}, expected {expected}" for seen, _ in found[1:] if seen != expected]
    for _, ours in found[1:]:
        lines += [
            f"parameter {i}" for i, (a, b) in enumerate(zip(ours, parameters, strict=True)) if not torch.equal(a, b)
        ]
    return lines


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_losses_are_those_of_gathers_in_high_precision(dtype: torch.dtype | None, pool2: Run) -> None:
    assert not [line for lines in pool2(beside_torchs, dtype, timeout=120) for line in lines]


def bytes_of(rank: int, world: int) -> tuple[int, int]:
    """The most bytes of unsharded parameters at a time, and those of a gather of each."""
    model: Any = flatfsdp.fully_shard(net(gathers=True)[4], reshard_after_forward=True)
    model(torch.ones(4, 32)).sum().backward()
    assert model.weight.grad.dtype == torch.float32
    return inspect.memory(model).peak("unsharded"), inspect.comm_stats(model).bytes["all_gather"]


def test_a_byte_for_each_element(pool2: Run) -> None:
    numel = 32 * 16
    assert pool2(bytes_of) == [(numel, 2 * numel)] * 2


def under_tensor_parallelism(rank: int, world: int) -> list[str]:
    warnings.simplefilter("ignore")
    mesh, found = mesh_of(2, 2), []
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}
    for package, gathers, scales in ((theirs, False, False), (flatfsdp, True, True)):
        model = net(gathers=gathers)
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
        model = sharded(package, model, mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        found.append(losses(model, rank // 2, scales=scales, optimizer=optimizer))
    return [f"{seen}, expected {found[0]}" for seen in found[1:] if seen != found[0]]


def test_inside_of_dtensors(pool4: Run) -> None:
    assert not [line for lines in pool4(under_tensor_parallelism, timeout=120) for line in lines]


def kept(rank: int, world: int, folder: str) -> list[str]:
    """Copies, pickles, checkpoints, and a model from the meta device train on."""
    warnings.simplefilter("ignore")
    model = sharded(flatfsdp, net(gathers=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses(model, rank, optimizer=optimizer, scales=True)
    twin, its = copy.deepcopy((model, optimizer))
    pickled = saved(model)
    of_pickled = torch.optim.AdamW(pickled.parameters(), lr=0.01)
    of_pickled.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    other = sharded(flatfsdp, net(gathers=True, meta=True))
    other.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(1.0)
    others = torch.optim.AdamW(other.parameters(), lr=0.01)
    read = dict(zip(("model", "optimizer"), get_state_dict(other, others), strict=True))
    dcp.load(read, checkpoint_id=folder)
    set_state_dict(other, others, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    pairs = ((model, optimizer), (twin, its), (pickled, of_pickled), (other, others))
    seen = [losses(each, rank, optimizer=one, scales=True) for each, one in pairs]
    return [f"{each}, expected {seen[0]}" for each in seen[1:] if each != seen[0]]


def test_copies_and_checkpoints_train_on(pool2: Run, tmp_path: Path) -> None:
    assert not [line for lines in pool2(kept, str(tmp_path), timeout=120) for line in lines]
