"""The way of one unit through the engine's files in a step: how many calls, changes of file and frames it takes."""

from __future__ import annotations

import pytest

from tests.harness.walk import FRONTS, Figures, walk

pytestmark = pytest.mark.single_process

# Of a step. They may become fewer, and more only for a reason.
MOST = {
    "wrapper": Figures(calls=165, changes=100, deepest=10, to_collective=7),
    "fully_shard": Figures(calls=201, changes=119, deepest=12, to_collective=8),
}


@pytest.mark.parametrize("front", FRONTS)
def test_the_walk_of_one_unit_is_short(front: str) -> None:
    found, most = walk(front)["step"], MOST[front]
    assert found.calls <= most.calls, found
    assert found.changes <= most.changes, found
    assert found.deepest <= most.deepest, found
    assert found.to_collective <= most.to_collective, found
