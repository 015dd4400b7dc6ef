"""The host cost of an engine in machine instructions: one step of tiny units under valgrind.

The cells are those of `host.py`. Unlike times, these counts do not depend on other processes of the machine.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .engines import BASE, ENGINES, FLOOR, Place
from .host import TENSORS, UNITS
from .machine import ROOT
from .models import tiny_case
from .ranks import fake_world
from .rounds import Cell, note
from .table import machine_line, markdown

SWITCH = Path(__file__).with_name("callgrind_switch.c")
WORLD = 8
BEFORE = 8  # steps: for one-time work, and for CPython's specialization
GOALS = {2: 0.30, 12: 0.42}  # as shares of `BASE`, by tensors of a unit
LIMIT = 900.0  # seconds for a cell
PYTHON = "libpython"
ENGINES_COUNTED = ("fsdp1", "fsdp1-orig", "flatfsdp", "flatfsdp-orig", FLOOR)
HOW = (
    f"One step of {UNITS} units on a fake group of {WORLD} ranks (the cells of `tools/benchmark/host.py`), counted by "
    f"valgrind (`--tool=callgrind`) for that step alone, after {BEFORE} others. Thousands of instructions of a unit's "
    'forward and backward; "Python" is what runs in libpython, the rest autograd, kernels, copies and collectives.'
)


def why_not() -> str:
    """A message about a missing tool for counting instructions; "" if none is missing."""
    if shutil.which("valgrind") is None:
        return "instructions are counted by valgrind, which is not there: apt-get install valgrind"
    if shutil.which("cc") is None:
        return "instructions are counted by a small C library, and there is no C compiler (cc) to build it"
    return ""


def count_all(engines: Sequence[str]) -> list[Cell]:
    """Instructions per unit and step by shared library, for every engine and number of tensors. Precondition:
    `why_not()` is empty."""
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        switch = Path(folder) / "switch.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", switch, SWITCH], check=True)
        for engine in engines:
            for tensors in TENSORS:
                cell: Cell = {"engine": engine, "tensors": tensors}
                try:
                    counts = count_step(engine, tensors, Path(folder), switch)
                    cells.append({**cell, "libraries": {name: n / UNITS for name, n in counts.items()}})
                except (subprocess.SubprocessError, OSError) as error:
                    cells.append({**cell, "error": str(error)})
                note(cells[-1])
    return cells


def count_step(engine: str, tensors: int, folder: Path, switch: Path) -> Counter[str]:
    """Instructions of one step of `UNITS` units by shared library, in a separate process, which leaves its output in
    ``folder``.

    Raises:
        CalledProcessError: the process failed. OSError: it left no counts.
    """
    out = folder / f"{engine}.{tensors}"
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
    child = [sys.executable, "-W", "ignore", "-m", __spec__.name, engine, str(tensors), str(switch)]
    # Other hash seeds order sets differently, and threads would share the step.
    env = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    env.pop("LD_PRELOAD", None)
    subprocess.run([*valgrind, *child], cwd=ROOT, env=env, check=True, capture_output=True, timeout=LIMIT)
    return by_library(out.with_name(f"{out.name}.1").read_text())  # the first dump, which the switch requested


def by_library(dump: str) -> Counter[str]:
    """Instructions by shared library in a file of callgrind's format; those of calls count for the callees.

    A name is written once, with a number that stands for it later: ``ob=(3) /lib/libc.so.6``, then ``ob=(3)``.
    The line after ``calls=`` has the cost of the call.
    """
    counts: Counter[str] = Counter()
    names: dict[str, str] = {}
    library, is_of_call = "", False
    for line in dump.splitlines():
        if match := re.match(r"(c?)ob=\((\d+)\)(?: (.+))?", line):
            called, number, name = match.groups()
            if name:
                names[number] = name.rpartition("/")[2]
            if not called:
                library = names[number]
        elif line.startswith("calls="):
            is_of_call = True
        elif re.match(r"[-+*\d]", line):
            words = line.split()
            if not is_of_call and len(words) > 1:
                counts[library] += int(words[1])
            is_of_call = False
    return counts


def step_once(engine: str, tensors: int, switch: str) -> None:
    """The process under valgrind: ``switch`` is the library that starts and stops counting."""
    counting = ctypes.CDLL(switch)
    torch.set_num_threads(1)
    case = tiny_case(UNITS, tensors)
    fake_world(WORLD)
    model = ENGINES[engine].wrap(case.build(), Place(torch.device("cpu"), case.unit))
    batch = case.batch(0, 0)
    for _ in range(BEFORE):
        model(*batch).backward()
        model.zero_grad()
    gc.collect()
    gc.disable()
    counting.counting_begin()
    model(*batch).backward()
    counting.counting_end()
    os._exit(0)  # the normal exit takes minutes


def render(results: dict[str, Any]) -> str:
    """The counts of every engine, and their distance from the goals."""
    machine, cells = results["machine"], results["instructions"]
    counts = {(c["engine"], c["tensors"]): c["libraries"] for c in cells if "libraries" in c}
    lines = ["# Machine instructions of forward and backward, per unit and step", "", machine_line(machine), "", HOW]
    lines += ["", f"Made by `{machine['command']}`.", ""]
    header = ["engine"]
    for n in TENSORS:
        header += [f"{n} tensors", f"to {ENGINES[BASE].title}'s", "of that Python"]
    rows = []
    for engine in dict.fromkeys(cell["engine"] for cell in cells):
        row = ["the layers alone" if engine == FLOOR else ENGINES[engine].title]
        for n in TENSORS:
            row += _figures(counts.get((engine, n)), counts.get((BASE, n)))
        rows.append(row)
    lines += markdown(header, rows)
    for engine, n in counts:
        if engine.startswith("flatfsdp") and n in GOALS and (BASE, n) in counts:
            lines.append(_goal(engine, n, counts[engine, n], counts[BASE, n]))
    lines += [f"{cell['engine']}, {cell['tensors']} tensors: {cell['error']}" for cell in cells if "error" in cell]
    return "\n".join(lines).rstrip() + "\n"


def notes(page: Path) -> str:
    """The handwritten part of a page: from its first section on."""
    _, heading, rest = page.read_text().partition("\n## ") if page.exists() else ("", "", "")
    return heading + rest


def _figures(found: dict[str, float] | None, base: dict[str, float] | None) -> list[str]:
    if found is None:
        return ["-"] * 3
    whole = sum(found.values())
    return [_k(whole), f"{whole / sum(base.values()):.2f}" if base else "-", _k(python_of(found))]


def _goal(engine: str, tensors: int, found: dict[str, float], base: dict[str, float]) -> str:
    whole, python, goal = sum(found.values()), python_of(found), GOALS[tensors] * sum(base.values())
    left = goal - (whole - python)
    return (
        f"- {ENGINES[engine].title}, {tensors} tensors: {GOALS[tensors]:.2f} of {ENGINES[BASE].title}'s would be "
        f"{_k(goal)}. Outside of Python it takes {_k(whole - python)}, which leaves {_k(left)} for Python, where it "
        f"takes {_k(python)}."
    )


def python_of(libraries: dict[str, float]) -> float:
    """Instructions in the library of Python."""
    return sum(count for name, count in libraries.items() if name.startswith(PYTHON))


def _k(count: float) -> str:
    return f"{count / 1000:.0f}"


if __name__ == "__main__":
    step_once(sys.argv[1], int(sys.argv[2]), sys.argv[3])
