"""The nucleus of the engine imports no other package; its size."""

from __future__ import annotations

import pytest

from tests.harness.nucleus_alone import BESIDE, NUCLEUS
from tests.repository.test_layering import edges, sources

pytestmark = pytest.mark.unit

LINES, FILES = 10_000, 60  # at most: what can be read in an afternoon


def package_of(file: str) -> str:
    """The package of the engine that a file belongs to, or the name of the file."""
    parts = file.split("/")
    return parts[1] if parts[0] == "engine" and len(parts) > 2 else file


def test_the_nucleus_imports_nothing_else() -> None:
    inside = NUCLEUS | BESIDE
    of_engine = [(one, other) for one, other in edges() if one.startswith("engine/")]
    others = {other for one, other in of_engine if package_of(one) in inside and package_of(other) not in inside}
    found = sorted(others - {"api", "errors", "engine/__init__"})
    assert not found, f"the nucleus imports these; let it be given a value or an observer instead: {found}"


def test_the_nucleus_can_be_read() -> None:
    inside = [each for each in sources() if each.file.startswith("engine/") and package_of(each.file) in NUCLEUS]
    lines = sum(each.path.read_text().count("\n") for each in inside)
    assert 0 < lines <= LINES and len(inside) <= FILES, (lines, len(inside))
