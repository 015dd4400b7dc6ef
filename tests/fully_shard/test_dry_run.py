"""Dry runs of modules of fully_shard: the bytes and collectives of the real job, from any device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import flatfsdp
from tests.harness.gather_hooks import AsBfloat16, extend

pytestmark = pytest.mark.single_process


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", [None, AsBfloat16])
def test_bytes(kind: Any, device: str) -> None:
    layers = [nn.Linear(64, 128, bias=False, device=device), nn.Linear(128, 64, bias=False, device=device)]
    model: Any = nn.Sequential(*(extend(each, kind) if kind else each for each in layers))
    itemsize, numel = 2 if kind else 4, 64 * 128
    with flatfsdp.dry_run(4):
        for each in layers:
            flatfsdp.fully_shard(each, reshard_after_forward=True)
        flatfsdp.fully_shard(model)
        model.to_empty(device="cpu")
        model(torch.ones(2, 64)).sum().backward()
        stats = flatfsdp.stats(model)
        assert stats.bytes_params == 2 * numel * 4 // 4
        # One layer computes while the other is gathered; hooks have memory in float32 in addition to the gathered one.
        assert stats.bytes_unsharded_peak == 2 * numel * itemsize + (numel * 4 if kind else 0)
        assert stats.comm["all_gather"][1] % (numel * itemsize) == 0
        assert flatfsdp.memory_plan(model)
