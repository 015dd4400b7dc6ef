"""Bytes that a step copies and scales outside of its exchanges, counted as the benchmark counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import flatfsdp
from flatfsdp import MixedPrecision
from tests.comm.test_communication import NUMELS, Tower, forward, padded, settled, wrapped
from tests.harness.fake import fake_world
from tools.benchmark.figures import Counting

pytestmark = pytest.mark.single_process

WORLD = 4
SHARDS = 4 * sum(padded(NUMELS, WORLD)) // WORLD  # bytes of this rank's, in float32
GRADIENTS = 4 * sum(NUMELS)  # bytes of all gradients before they are reduced
BF16 = MixedPrecision(torch.bfloat16, torch.float32)


def counts_of(strategy: str, **options: Any) -> Counting:
    with fake_world(WORLD):
        model = wrapped(strategy, **options)
        settled(model)
        with Counting(model) as counting:
            counting.mark()
            loss = forward(model)
            counting.mark()
            loss.backward()
        return counting


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_gradients_are_copied_once_and_nothing_else(strategy: str, orig: bool) -> None:
    counting = counts_of(strategy, use_orig_params=orig)
    assert dict(counting.copied) == {"backward": GRADIENTS}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_only_shards_are_scaled(strategy: str) -> None:
    """Once for each. The model itself multiplies by numbers, too."""
    own = _scaled_by_the_model()
    assert counts_of(strategy).scaled - own == SHARDS


def _scaled_by_the_model() -> int:
    model = Tower()
    with Counting(model) as counting:
        counting.mark()
        loss = forward(model)
        counting.mark()
        loss.backward()
    return counting.scaled


def test_a_cast_goes_into_the_own_slot_of_a_gather() -> None:
    counting = counts_of("SHARD_GRAD_OP", mixed_precision=BF16)
    assert counting.copied["own slot"] == SHARDS


def test_what_post_forward_ranks_keep_is_copied_out_once() -> None:
    counting = counts_of("FULL_SHARD", reshard_after_forward=2)
    assert dict(counting.copied) == {"forward": 4 * sum(padded(NUMELS, WORLD)) // 2, "backward": GRADIENTS}


WIDE = 192  # matrices of 144 KiB, whose pieces are exchanged where they lie


@pytest.mark.parametrize("dim", [0, 1])
def test_dtensors_of_rows_and_of_columns_are_copied_no_more(dim: int) -> None:
    """Columns are rows of a matrix that lies in memory the other way round. [Note: stored order]"""
    with fake_world(WORLD):
        model: Any = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(2)))
        for module in (*model, model):
            flatfsdp.fully_shard(module, reshard_after_forward=True, shard_placement_fn=lambda parameter: Shard(dim))
        for _ in range(2):  # in the first one ranks compare their models
            model.zero_grad()
            with Counting(model) as counting:
                counting.mark()
                loss = model(torch.ones(2, WIDE)).sum()
                counting.mark()
                loss.backward()
        assert dict(counting.copied) == {"backward": 2 * 4 * WIDE * WIDE}  # gradients, into the reduction's input
