"""Tests of random seeds that `test_random_runs` plays: each ends in its own way."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.harness.pool import JobFailed
from tests.harness.thorough import seeds


def _rank(rank: int, world: int, seed: int) -> list[str]:
    if seed % 10 == 3:
        raise ValueError("this seed is refused")
    return ["differs"] * (seed % 10 == 1)


@pytest.mark.parametrize("seed", seeds(1, 2))
def test_ranks(run: Run, seed: int) -> None:
    try:
        assert run(2, _rank, seed) == [[], []]
    except JobFailed as error:
        assert "this seed is refused" in str(error)


@pytest.mark.parametrize("seed", seeds(1, 2))
def test_process(run: Run, seed: int) -> None:
    if seed % 10 == 8:
        run(2, _hangs, str(seed))
    if seed % 10 == 2:
        os._exit(3)


def _hangs(rank: int, world: int, seed: str) -> None:
    (Path(os.environ["FLATFSDP_RANDOM_TESTS"]) / f"{rank}").write_text(f"{os.getpid()}")
    time.sleep(100)


@pytest.mark.parametrize("seed", [5])
def test_of_one_seed(run: Run, seed: int) -> None:
    raise AssertionError("is not played: it does not draw its seeds")
