"""Microbatches under `no_sync` in low precision: under `as_torch` they add up as in torch's FSDP1, to the bit."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import Tensor, nn

import flatfsdp
from flatfsdp.engine.config import fsdp1_mode
from tests.conftest import Run
from tests.harness import inspect

pytestmark = pytest.mark.distributed

MICROBATCHES, STEPS = 3, 2
CASES = {
    "bf16": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float32),
    "all bf16": (torch.bfloat16, torch.bfloat16),
    "reduced in bf16": (None, torch.bfloat16),
}


def trained(package: Any, rank: int, case: str, orig: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.Sequential(nn.Linear(16, 16), nn.GELU()), nn.Linear(16, 4))
    param, reduce = CASES[case]
    model = package.FullyShardedDataParallel(
        net,
        auto_wrap_policy=partial(torchs.wrap.size_based_auto_wrap_policy, min_num_params=200),
        mixed_precision=package.MixedPrecision(param_dtype=param, reduce_dtype=reduce),
        use_orig_params=orig,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        for microbatch in range(MICROBATCHES):
            with nullcontext() if microbatch == MICROBATCHES - 1 else model.no_sync():
                model(torch.randn(5, 12, generator=generator)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def differences(rank: int, world: int, case: str, orig: bool, as_torch: bool) -> list[str]:
    expected = trained(torchs, rank, case, orig)
    with patch.object(fsdp1_mode, "active", as_torch):
        found = trained(flatfsdp, rank, case, orig)
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def trained_in_place(package: Any, rank: int, case: str) -> list[Tensor]:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(12, 16), nn.Sequential(nn.Linear(16, 16), nn.GELU()), nn.Linear(16, 4))
    policy = package.MixedPrecisionPolicy(*CASES[case])
    for each in (*net, net):
        package.fully_shard(each, mp_policy=policy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        for microbatch in range(MICROBATCHES):
            net.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)
            net(torch.randn(5, 12, generator=generator)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().to_local().clone() for parameter in net.parameters()]


def differences_in_place(rank: int, world: int, case: str) -> list[int]:
    expected = trained_in_place(torchs, rank, case)
    with patch.object(fsdp1_mode, "active", True):
        found = trained_in_place(flatfsdp, rank, case)
    return [n for n, (one, other) in enumerate(zip(found, expected, strict=True)) if not torch.equal(one, other)]


@pytest.mark.parametrize("case", CASES)
def test_under_fully_shard_they_add_up_as_in_fsdp2(pool2: Run, case: str) -> None:
    assert pool2(differences_in_place, case) == [[], []]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("orig", [True, False])
def test_they_add_up_as_in_fsdp1(pool2: Run, case: str, orig: bool) -> None:
    assert pool2(differences, case, orig, True) == [[], []]


@pytest.mark.parametrize("case", ["bf16", "reduced in bf16"])
def test_elsewhere_they_add_up_in_the_reduce_dtype(pool2: Run, case: str) -> None:
    for found in pool2(differences, case, True, False):
        assert found


def bytes_of_a_window(rank: int, world: int, accumulated: torch.dtype | None) -> tuple[int, int]:
    """Of unsharded gradients after a microbatch under `no_sync`, and of the synchronized backward at its peak."""
    net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    precision = flatfsdp.MixedPrecision(torch.bfloat16, torch.float32, accumulate_dtype=accumulated)
    model: Any = flatfsdp.FullyShardedDataParallel(
        net, auto_wrap_policy={nn.Linear}, mixed_precision=precision, join_units_below=0
    )
    ledger = inspect.memory(model)
    with model.no_sync():
        model(torch.ones(2, 16)).sum().backward()
    kept = ledger.live["slots"]
    ledger.reset_peaks()
    model(torch.ones(2, 16)).sum().backward()
    return kept, ledger.peak("slots")


def test_a_window_has_the_bytes_of_its_dtype_and_of_the_unit_that_is_reduced(pool2: Run) -> None:
    unit = 16 * 16
    assert pool2(bytes_of_a_window, None) == [(4 * unit * 4, 4 * unit * 4)] * 2
    assert pool2(bytes_of_a_window, torch.bfloat16) == [(4 * unit * 2, 4 * unit * 2 + unit * 4)] * 2
