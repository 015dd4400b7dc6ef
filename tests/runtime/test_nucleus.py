"""The nucleus of the engine trains with every other package blocked from import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.nucleus_alone import BESIDE, NUCLEUS
from tests.trainer.test_train import environment

pytestmark = pytest.mark.process


WORLD = 4  # two shards of two replicas


def test_the_nucleus_trains_alone(tmp_path: Path) -> None:
    """On two ranks, on two times two, and on one."""
    command = [sys.executable, "-m", "tests.harness.nucleus_alone"]
    root = Path(__file__).resolve().parents[2]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD), str(tmp_path / "store")],
            cwd=root,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [each.communicate(timeout=300)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    expected = " ".join(["imported:", *sorted(NUCLEUS | BESIDE)])
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0 and output.splitlines()[-1] == expected, output
