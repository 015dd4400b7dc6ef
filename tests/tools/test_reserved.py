"""Every engine trains on the card that does not exist."""

from __future__ import annotations

from functools import partial

import pytest

from tests.harness import fresh
from tools.benchmark.models import GPT, Case, GPTBlock
from tools.reserved.allocator import MIB
from tools.reserved.training import Figures, measure

pytestmark = pytest.mark.process

# 12 * 256**2 + 13 * 256 elements in each block, and 2 * 512 * 256 + 64 * 256 + 2 * 256 in the root
SMALL = Case("small", partial(GPT, 512, 64, 256, 2, 4), GPTBlock, 64, 512, 1)
PARAMETERS = 2 * (12 * 256**2 + 13 * 256) + 2 * 512 * 256 + 64 * 256 + 2 * 256


def measured(rank: int, world: int, engine: str) -> Figures:
    """In a process that has imported torch and has not trained."""
    return measure(SMALL, engine, 8)


@pytest.mark.parametrize("engine", ["flatfsdp", "flatfsdp-front", "fsdp1", "fsdp2"])
def test_each_engine_trains_and_holds_its_shards_the_moments_and_workspaces_between_steps(engine: str) -> None:
    (outcome,) = fresh.run(1, measured, engine)
    assert outcome.exit_code == 0, outcome
    found = outcome.result
    wanted = 3 * 4 * PARAMETERS / 8 + 65 * MIB
    assert wanted <= found.between <= wanted + MIB  # small tensors are rounded up
    assert found.between < found.allocated <= found.in_use < found.reserved
    assert found.retries == 0
