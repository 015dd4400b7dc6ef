"""The nucleus of the engine imports no other package, except for a list that may only shrink; its size."""

from __future__ import annotations

import pytest

from tests.harness.nucleus_alone import BESIDE, NUCLEUS
from tests.repository.test_layering import edges, sources

pytestmark = pytest.mark.unit

# Files of other packages that files of the nucleus still import: the comparisons of ranks.
LEAKS = frozenset(
    """
    agreement/agreement agreement/checksums agreement/divergence agreement/model_check agreement/once_per_job
    agreement/ops agreement/rank_exchange
    """.split()
)
LINES, FILES = 14_600, 74  # at most; the goals are 10,000 and 60


def package_of(file: str) -> str:
    """The package of the engine that a file belongs to, or the name of the file."""
    parts = file.split("/")
    return parts[1] if parts[0] == "engine" and len(parts) > 2 else file


def test_the_nucleus_imports_nothing_else() -> None:
    inside = NUCLEUS | BESIDE
    others = {other for one, other in edges() if package_of(one) in inside and package_of(other) not in inside}
    found = {name.removeprefix("engine/") for name in others - {"api", "errors", "engine/__init__"}}
    more, gone = sorted(found - LEAKS), sorted(LEAKS - found)
    assert not more, f"the nucleus imports these; let it be given a value or an observer instead: {more}"
    assert not gone, f"take these out of the list, which may only shrink: {gone}"


def test_the_nucleus_grows_no_more() -> None:
    inside = [each for each in sources() if package_of(each.file) in NUCLEUS]
    lines = sum(each.path.read_text().count("\n") for each in inside)
    assert 0 < lines <= LINES and len(inside) <= FILES, (lines, len(inside))
