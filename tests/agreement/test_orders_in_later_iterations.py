"""The faults of `tests/agreement/test_orders.py` in a later iteration, when nothing is exchanged. Each has one of the
fronts here, and both there."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

import flatfsdp
from tests.agreement.test_orders import FAULTS, FRONTS, OF_TWO, SECONDS, commit, shard, step
from tests.agreement.test_orders import Net as Net
from tests.harness import fresh
from tests.harness.thorough import spread

pytestmark = pytest.mark.process

LIMIT = 60.0  # seconds for all ranks to end once they have started; on idle cores it takes 3


def later(rank: int, world: int, fault: str, front: str) -> None:
    dist.init_process_group("gloo")
    flatfsdp.set_collective_timeout(report_after=1000)  # no report of a wait is needed
    torch.manual_seed(0)
    models = [shard(front, Net(front)) for _ in range(1 + (fault in OF_TWO))]
    for _ in range(2):
        if fault == "backwards swapped":
            commit(0, world, models, fault)
            continue
        for model in models:
            step(model, **FAULTS[fault][0])
    began = time.monotonic()
    try:
        commit(rank, world, models, fault)
    finally:
        print(f"ended after {time.monotonic() - began:.1f} s", flush=True)


@pytest.mark.ranks(2, later, of=["fault", "front"], timeout=LIMIT)
@pytest.mark.parametrize(("front", "fault"), spread(FRONTS, FAULTS))
def test_every_rank_ends_in_words(outcomes: list[fresh.Outcome], fault: str, front: str) -> None:
    reported = set()
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 1, (rank, outcome)
        words = f"{outcome.output}\n{outcome.error or ''}"
        found = re.search(r"AgreementError: (ranks? .*\branks? .*1.*)", words)
        assert found is not None, (rank, outcome)
        reported.add(found[1])
        ended = re.search(r"ended after ([0-9.]+) s", words)
        assert ended is not None and float(ended[1]) < SECONDS, words
    assert len(reported) == 1, reported
