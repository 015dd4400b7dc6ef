"""Microbatches that only one rank gets wrong: every rank ends with that error, within seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel
from tests.harness.fresh import Outcome

pytestmark = pytest.mark.process


def part(rank: int, world: int, case: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(5, 3), use_orig_params=True, deterministic_sums=True)

    def run_one(index: int | None, of: int) -> None:
        with flatfsdp.microbatch(index, of=of):
            model(torch.ones(2, 5)).sum().backward()

    for _ in range(2):  # from the second step on, ranks exchange nothing to agree
        run_one(rank, 4)
        run_one(rank + 2, 4)
        model.zero_grad()
    run_one(rank, 4)
    if case == "no microbatch" and rank == 1:
        model(torch.ones(2, 5)).sum().backward()
    else:
        run_one(1 if rank == 1 and case == "again" else rank + 2, 5 if rank == 1 and case == "of" else 4)


WORDS = {
    "no microbatch": "outside of flatfsdp.microbatch()",
    "again": "a backward of this microbatch has run in this step",
    "of": "earlier microbatches of this step had of=4",
}


@pytest.mark.ranks(2, part, of=["case"], timeout=60)
@pytest.mark.parametrize("case", WORDS)
def test_one_rank(outcomes: list[Outcome], case: str) -> None:
    for each in outcomes:
        assert each.exit_code not in (0, None)
    first, second = (found.output + (found.error or "") for found in outcomes)
    assert WORDS[case] in second
    assert "rank 1" in first and WORDS[case] in first


def no_sync_on_one(rank: int, world: int) -> Any:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(5, 3), use_orig_params=True, deterministic_sums=True)
    for number in range(2):
        with flatfsdp.microbatch(rank + 2 * number, of=4):
            loss = model(torch.ones(2, 5)).sum()
            if rank == 0 and number:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()


@pytest.mark.ranks(2, no_sync_on_one, timeout=60)
def test_no_sync_on_one_rank(outcomes: list[Outcome]) -> None:
    for each in outcomes:
        assert each.exit_code not in (0, None)
        assert "Rank 0 accumulated gradients under no_sync() where rank 1 reduced them" in each.output + str(each.error)
