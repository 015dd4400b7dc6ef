"""A rank that leaves a loop over uneven inputs alone: every rank ends with our error, within seconds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import flatfsdp
from tests.agreement.test_agreement import PARTING
from tests.agreement.test_ranks_that_part import reported_to_all
from tests.features.test_uneven import WIDTH, batches, build, wrap
from tests.harness import fresh

pytestmark = pytest.mark.process


def leave(rank: int, world: int, raising: bool) -> None:
    dist.init_process_group("gloo")
    model = wrap(build())
    try:
        with flatfsdp.join(model) as joined:
            for step, batch in enumerate(joined(batches(rank, 6))):
                if raising and rank == 1 and step == 3:
                    raise ValueError("bad batch")
                model(batch).sum().backward()
                if rank == 1 and step == 3:
                    break
    except ValueError:
        pass  # and go on with the next epoch
    model(torch.ones(2, WIDTH))


@pytest.mark.ranks(2, leave, of=["raising"], timeout=120)
@pytest.mark.parametrize(
    ("raising", "text"),
    [
        (
            False,
            "rank 0 requested the next batch in the loop of flatfsdp.join(); rank 1 left the loop of flatfsdp.join()",
        ),
        (
            True,
            "rank 0 began a training forward at unit <root>; rank 1 abandoned its iteration in the loop of "
            "flatfsdp.join() after ValueError: bad batch",
        ),
    ],
)
def test_one_rank_leaves(outcomes: list[fresh.Outcome], raising: bool, text: str) -> None:
    step = 3 if raising else 4
    assert reported_to_all(outcomes) == f"ranks diverged at step {step}: {text}{PARTING}"
