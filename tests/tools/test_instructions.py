"""Counts of machine instructions: reading valgrind's files, and the text of the page on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.benchmark import instructions

pytestmark = pytest.mark.unit

DUMP = """# callgrind format
version: 1
desc: Timerange: Basic block 0 - 8820878
positions: line
events: Ir
summary: 178

ob=(11) /usr/lib/libpython3.11.so.1.0
fl=(66) Modules/_operator.c
fn=(1048) attrgetter
1394 100
+1 20
fe=(66)
-1 5
cob=(3) /opt/torch/lib/libtorch_cpu.so
cfn=(1052) kernel
calls=7 +5
* 1000

fn=(1049) attrgetter'2
* 3

ob=(3)
fn=(1052)
+9 40
1400 10
total 178
"""

MACHINE = {
    "date": "2026", "commit": "c", "torch": "2", "python": "3", "cores": 2, "cpu": "x", "memory_gib": 8,
    "device": "cpu", "command": "tools/bench --instructions",
}  # fmt: skip


def test_instructions_of_calls_count_where_they_run() -> None:
    assert instructions.by_library(DUMP) == {"libpython3.11.so.1.0": 128, "libtorch_cpu.so": 50}


def cell(engine: str, tensors: int, python: float, rest: float) -> dict[str, object]:
    libraries = {"libpython3.11.so.1.0": python, "libtorch_cpu.so": rest}
    return {"engine": engine, "tensors": tensors, "libraries": libraries}


def test_the_page_says_what_the_goals_would_take() -> None:
    cells = [
        cell("fsdp1", 2, 1800e3, 900e3), cell("flatfsdp", 2, 700e3, 300e3),
        cell("fsdp1", 12, 2400e3, 1600e3), {"engine": "flatfsdp", "tensors": 12, "error": "valgrind died"},
    ]  # fmt: skip
    text = instructions.render({"machine": MACHINE, "instructions": cells})
    assert "| FSDP1 | 2700 | 1.00 | 1800 | 4000 | 1.00 | 2400 |" in text
    assert "| flatfsdp | 1000 | 0.37 | 700 | - | - | - |" in text
    assert "0.30 of FSDP1's would be 810. Outside of Python it takes 300, which leaves 510 for Python" in text
    assert "flatfsdp, 12 tensors: valgrind died" in text


def test_notes_by_hand_stay(tmp_path: Path) -> None:
    page = tmp_path / "host_instructions.md"
    assert instructions.notes(page) == ""
    page.write_text("# Old table\n\n| 1 |\n\n## Before\n\nText.\n\n## More\n")
    assert instructions.notes(page) == "\n## Before\n\nText.\n\n## More\n"


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions.shutil, "which", lambda name: None)
    assert "apt-get install valgrind" in instructions.why_not()
    monkeypatch.setattr(instructions.shutil, "which", lambda name: "/usr/bin/valgrind" if name == "valgrind" else None)
    assert "no C compiler" in instructions.why_not()
