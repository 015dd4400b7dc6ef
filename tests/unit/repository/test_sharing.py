"""The order in which processes that share a run begin files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.harness.sharing import in_turn


def names(*paths: str) -> list[str]:
    items: Any = [SimpleNamespace(path=Path(path), number=number) for path in paths for number in range(2)]
    files = in_turn(items)
    assert all([item.number for item in of_file] == [0, 1] for of_file in files)
    return ["/".join(of_file[0].path.parts[1:]) for of_file in files]


def test_files_whose_tests_wait_are_spread_over_others_and_the_longest_begin() -> None:
    found = names(
        *(f"tests/distributed/test_{number}.py" for number in range(4)),
        *("tests/process/test_0.py", "tests/process/test_1.py", "tests/process/trainer/test_train.py"),
        *("tests/single_process/test_0.py", "tests/unit/test_0.py", "tests/unit/schedule/test_notes.py"),
    )
    assert found == [
        *("process/trainer/test_train.py", "unit/schedule/test_notes.py"),
        *("distributed/test_0.py", "process/test_0.py", "distributed/test_1.py", "process/test_1.py"),
        *("distributed/test_2.py", "distributed/test_3.py", "single_process/test_0.py", "unit/test_0.py"),
    ]


def test_a_selection_of_one_folder_keeps_its_order() -> None:
    chosen = [f"unit/test_{name}.py" for name in "bac"]
    assert names(*(f"tests/{name}" for name in chosen)) == chosen
