"""Processes that share a run: the order in which they begin files, and the reports that they hand on."""

from __future__ import annotations

from functools import partial
from operator import eq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.sharing import in_turn, read_report, written_report

pytestmark = pytest.mark.unit


def names(*files: str) -> list[str]:
    """The order of `files`, each given as its tier and its path."""
    items: Any = [
        SimpleNamespace(path=Path(path), number=number, get_closest_marker=partial(eq, tier))
        for tier, path in map(str.split, files)
        for number in range(2)
    ]
    found = in_turn(items)
    assert all([item.number for item in of_file] == [0, 1] for of_file in found)
    return [str(of_file[0].path) for of_file in found]


def test_files_whose_tests_wait_are_spread_over_others_and_the_longest_begin() -> None:
    found = names(
        *(f"distributed features/test_{number}.py" for number in range(4)),
        *("process features/test_p.py", "process trainer/test_p.py", "process trainer/test_train.py"),
        *("single_process features/test_s.py", "unit layout/test_u.py", "unit schedule/test_notes.py"),
    )
    assert found == [
        *("trainer/test_train.py", "schedule/test_notes.py"),
        *("features/test_0.py", "features/test_p.py", "features/test_1.py", "trainer/test_p.py"),
        *("features/test_2.py", "features/test_3.py", "features/test_s.py", "layout/test_u.py"),
    ]


def test_a_selection_of_one_tier_keeps_its_order() -> None:
    chosen = [f"base/test_{name}.py" for name in "bac"]
    assert names(*(f"unit {name}" for name in chosen)) == chosen


def test_reports_of_other_processes_are_those_of_one(request: pytest.FixtureRequest) -> None:
    skipped = ("tests/test_a.py", 7, "Skipped: no reason")  # --junitxml wants a tuple
    for longrepr in (skipped, "what failed", None):
        outcome: Any = "skipped" if longrepr is skipped else "failed"
        report = pytest.TestReport("test_a.py::test", ("test_a.py", 7, "test"), {}, outcome, longrepr, "call")
        found = read_report(request.config, written_report(request.config, report))
        assert (found.longrepr, found.outcome, found.when) == (longrepr, outcome, "call")
