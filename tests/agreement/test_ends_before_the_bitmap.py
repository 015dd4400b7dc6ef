"""A rank that lacks no gradient does not wait for the bitmap of those that do, and its program may end meanwhile."""

from __future__ import annotations

import os
import time
from multiprocessing import util
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.agreement.unused_params import UnusedParams
from tests.harness import fresh

pytestmark = pytest.mark.process


def ends_before_the_bitmap(rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    net = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
    model = FullyShardedDataParallel(net, auto_wrap_policy={nn.Linear}, use_orig_params=True)
    compares = UnusedParams.lacked_by_all

    def late(unused: UnusedParams, lacking: int) -> int:
        time.sleep(0.5 if lacking else 0.0)
        return compares(unused, lacking)

    with patch.object(UnusedParams, "lacked_by_all", late):
        for _ in range(3):
            outputs = [each(torch.ones(2, 4)).sum() for each in model.module]
            sum(outputs[: 2 - rank]).backward()  # rank 1 lacks gradients of the second unit
    if rank == 0:  # ends as one that `multiprocessing` has forked: no destructor waits
        util._exit_function()
        os._exit(0)


@pytest.mark.ranks(2, ends_before_the_bitmap, timeout=60)
def test_a_rank_that_ends_has_taken_part(outcomes: list[fresh.Outcome]) -> None:
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    assert outcomes[1].error is None
