"""Modules under the names that they had before. [Note: old names]"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import flatfsdp
from flatfsdp.engine.base.aliases import ALIASES
from tests.harness import manual

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import importlib, sys
import flatfsdp
from flatfsdp.engine.base.aliases import ALIASES
before = {name: getattr(flatfsdp, name) for name in flatfsdp.__all__}
assert not ALIASES.keys() & sys.modules.keys() - {"flatfsdp.owned"}, "importing flatfsdp imports no old name"
for old, new in ALIASES.items():
    assert importlib.import_module(old) is importlib.import_module(new), old
    assert sys.modules[new].__spec__.name == sys.modules[new].__name__ == new
assert before == {name: getattr(flatfsdp, name) for name in flatfsdp.__all__}, "what it offers stays"
from flatfsdp import root
assert root.__name__ == "flatfsdp.engine.runtime.resources"
for absent in ("flatfsdp.absent", "flatfsdp.policy.absent"):
    try:
        importlib.import_module(absent)
    except ModuleNotFoundError as error:
        assert error.name == absent
    else:
        raise AssertionError(absent)
"""


def test_each_is_the_module_of_today() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)


def test_nothing_here_uses_one() -> None:
    """Neither in imports nor in names within strings, where functions of the package are called like some of them."""
    shared = {name for name in ALIASES if name.rpartition(".")[2] in flatfsdp.__all__}
    old = "|".join(map(re.escape, sorted(ALIASES.keys() - shared, key=len, reverse=True)))
    files = [path for folder in ("flatfsdp", "tests", "tools") for path in (ROOT / folder).rglob("*.py")]
    own = {
        ROOT / "flatfsdp/engine/base/aliases.py",
        ROOT / "tests/distributed/repository/test_old_pickles.py",
        Path(__file__).resolve(),
    }
    found = [
        f"{path.relative_to(ROOT)}: {name[0]}"
        for path in {*files, *manual.PAGES, ROOT / "pyproject.toml"} - own
        for name in re.finditer(rf"\b({old})\b(?![/\w]|\.(?:py|json)\b)", path.read_text())
    ]
    assert found == ["flatfsdp/engine/state/owned_interval.py: flatfsdp.owned"]
