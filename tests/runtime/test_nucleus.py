"""The nucleus of the engine trains with every other package blocked from import."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import fresh, nucleus_alone

pytestmark = pytest.mark.process


WORLD = 4  # two shards of two replicas


def test_the_nucleus_trains_alone(tmp_path: Path) -> None:
    """On two ranks, on two times two, and on one."""
    expected = sorted(nucleus_alone.NUCLEUS | nucleus_alone.BESIDE)
    for rank in fresh.run(WORLD, nucleus_alone.trained, str(tmp_path / "store"), timeout=300):
        assert (rank.exit_code, rank.result) == (0, expected), rank
