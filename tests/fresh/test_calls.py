"""A rank that is alone in a collective call of ours while the others train: every rank ends with our error."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist

import flatfsdp
from tests.harness import fresh
from tests.harness.thorough import is_thorough
from tests.pool.test_agree import step
from tests.pool.test_calls import CALLS, Setting

LIMIT = 120.0
USUAL = ["FullyShardedDataParallel", "checkpoint.listing", "checkpoint.keep"]


def alone(rank: int, world: int, name: str) -> None:
    dist.init_process_group("gloo")
    flatfsdp.set_wait(report_after=1)
    setting = Setting(tempfile.mkdtemp())
    if rank == 1:
        CALLS[name](setting)
    for _ in range(3):
        step(setting.model)


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[list[fresh.Outcome]]]]:
    """All cases, three at a time: most of their seconds pass in waiting."""
    names = CALLS if is_thorough() else USUAL
    with ThreadPoolExecutor(3) as three:
        yield {name: three.submit(fresh.run, 2, alone, name, timeout=LIMIT) for name in names}


@pytest.mark.parametrize("name", CALLS if is_thorough() else USUAL)
def test_one_rank_calls_and_the_others_train(runs: dict[str, Future[list[fresh.Outcome]]], name: str) -> None:
    for rank, outcome in enumerate(runs[name].result()):
        assert outcome.exit_code == 1, outcome
        assert re.search(r"^\[flatfsdp, rank \d\] AgreementError: |AgreementError: ", outcome.output, re.MULTILINE), (
            rank
        )
        assert not re.search("does not answer|construct different", outcome.output), outcome
