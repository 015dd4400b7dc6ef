"""Programs of other frameworks that are written for FSDP1 or FSDP2 end under `flatfsdp.as_torch` with the numbers and
parameters that they have on torch's. Skipped where they are not installed; `tools/programs` has an environment with
all of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.harness.programs import Case, run
from tests.programs.frameworks.cases import CASES

pytestmark = pytest.mark.process


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_ends_as_on_torchs(case: Case, tmp_path: Path) -> None:
    for package in case.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    found = run(case, tmp_path, limit=180)
    assert not found.problems and found.largest <= case.bound, found
