"""What a feature may cost in lines, counted in one way: its files, functions that only it needs in other files, and
lines elsewhere that name it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

PACKAGE = Path(__file__).parents[2] / "flatfsdp"
FILES = (
    "engine/comm/sum_tree.py",
    "engine/features/audit.py",
    "engine/features/block_reducer.py",
    "engine/features/deterministic_checks.py",
    "engine/features/deterministic_sums.py",
    "engine/features/exact_sums.py",
    "engine/features/microbatches.py",
    "engine/transports/block_sums.py",
)
FUNCTIONS = {
    "engine/cpu/collectives.py": ["sum_blocks"],
    "engine/cpu/exchange.py": ["sum_blocks"],
    "engine/cpu/gloo.py": ["sum_blocks"],
    "engine/cpu/operations.py": ["BlockSum"],
    "engine/features/clip.py": ["exact_norm"],
    "engine/flat/gradients.py": ["take_window", "reuse"],
    "engine/guards/optimizer_hooks.py": ["sees_wholes"],
    "engine/transports/staged.py": ["sum_blocks", "_share"],
    "errors.py": ["AuditError"],
    "trainer/data_loading/loader.py": ["read", "reads_by_number"],
    "trainer/data_loading/sampling.py": ["cells", "first"],
    "trainer/run.py": ["begin_audit", "_run_again"],
}
NAMED = re.compile(
    r"deterministic(?!_algorithms| kernels)|DeterministicSums|[aA]udit\b|audit_|whole_batches|sum_blocks"
    r"|RankBlocks|BlockSum|exact_norm|exact_sums|microbatch\(|reads_by_number|take_window|sees_wholes"
)
NUMBERS = re.compile(r"seed is None|seed_all|numbered|index\b|losses\[|in_order")  # of trainer/gradients.py
ELSEWHERE = {"elastic/survive.py"}  # whose words name it


def lines_of(path: Path) -> int:
    name = str(path.relative_to(PACKAGE))
    lines = path.read_text().splitlines()
    if name in FILES:
        return len(lines)
    if name in ELSEWHERE:
        return 0
    words = [NAMED, NUMBERS] if name == "trainer/gradients.py" else [NAMED]
    counted = {number for number, line in enumerate(lines, 1) for each in words if each.search(line)}
    functions, found = FUNCTIONS.get(name, []), set()
    for node in ast.walk(ast.parse("\n".join(lines))) if functions else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in functions:
            found.add(node.name)
            first = min(node.lineno, *(each.lineno for each in node.decorator_list), node.lineno)
            counted.update(range(first, (node.end_lineno or 0) + 1))
    assert found == {*functions}, f"{name} has no { ({*functions} - found) }"
    return len(counted)


def test_deterministic_sums_and_audits() -> None:
    """At most 1,800 lines."""
    counts = {str(path.relative_to(PACKAGE)): lines_of(path) for path in sorted(PACKAGE.rglob("*.py"))}
    text = "\n".join(f"{number:5} {name}" for name, number in counts.items() if number)
    assert counts.keys() > {*FILES}
    assert sum(counts.values()) <= 1800, f"{sum(counts.values())}:\n{text}"
