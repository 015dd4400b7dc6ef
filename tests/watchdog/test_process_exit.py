"""The end of a process is reported once, for every cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

PROCESS_EXIT = Path(__file__).resolve().parents[2] / "flatfsdp" / "engine" / "watchdog" / "process_exit.py"

# The file alone: importing the package would import torch, which has no part in this.
PROGRAM = """
import importlib.util, multiprocessing, sys
spec = importlib.util.spec_from_file_location("process_exit", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

def body():
    module.at_end(lambda error: print("reported", "nothing" if error is None else module.in_words(error), flush=True))
    {body}

def caught():
    try:
        raise ValueError("out of luck")
    except ValueError:
        sys.exit(1)

def fork():
    import os
    child = os.fork()
    if child == 0:
        raise KeyError("a child")
    os.waitpid(child, 0)

if __name__ == "__main__":
    if {process}:
        child = multiprocessing.get_context("spawn").Process(target=body)
        child.start()
        child.join(60)
    else:
        body()
"""


@pytest.mark.parametrize(
    ("body", "process", "message"),
    [
        ("pass", False, "nothing"),
        ("raise ValueError('out of luck')", False, "ValueError: out of luck"),
        ("fork()", False, "nothing"),
        ("pass", True, "nothing"),
        ("raise ValueError('out of luck')", True, "ValueError: out of luck"),
        ("caught()", True, "ValueError: out of luck"),
        ("sys.exit(0)", True, "nothing"),
        ("sys.exit(3)", True, "SystemExit: 3"),
    ],
)
def test_what_ends_a_process_is_reported_once(tmp_path: Path, body: str, process: bool, message: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(path=str(PROCESS_EXIT), body=body, process=process))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"reported {message}\n", done
    assert done.stderr.count("Traceback") == (1 if "raise" in body else 1 if body == "fork()" else 0), done.stderr
