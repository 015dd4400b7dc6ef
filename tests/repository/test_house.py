"""A file has one idea, in at most 600 lines; and a name has one meaning."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

PACKAGE = Path(__file__).resolve().parents[2] / "flatfsdp"
FILE = 600  # lines


def test_files() -> None:
    lines = {path.relative_to(PACKAGE).as_posix(): path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}
    too_long = {name: count for name, count in lines.items() if count > FILE}
    assert lines and not too_long, f"files over {FILE} lines: {too_long}"


def test_names_of_classes_with_one_meaning() -> None:
    """A part is that of a whole tensor which tensor parallelism splits ([Note: parts of wholes]); this rank's elements
    of a parameter are a piece. Intervals, targets and positions are called so, and not places."""
    found = [
        (path.relative_to(PACKAGE).as_posix(), each.name)
        for path in sorted((PACKAGE / "engine").rglob("*.py"))
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.ClassDef) and each.name in ("Part", "Place")
    ]
    assert found == [("engine/layout/layout.py", "Part")]
