"""A file has one idea, in at most 600 lines."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

PACKAGE = Path(__file__).resolve().parents[2] / "flatfsdp"
FILE = 600  # lines


def test_files() -> None:
    lines = {path.relative_to(PACKAGE).as_posix(): path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}
    too_long = {name: count for name, count in lines.items() if count > FILE}
    assert lines and not too_long, f"files over {FILE} lines: {too_long}"
