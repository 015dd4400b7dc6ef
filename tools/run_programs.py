"""Runs the programs of tests/programs/frameworks, each on torch's FSDP1 or FSDP2 and under `flatfsdp.as_torch`, and the
tests that need other packages. Writes a dated table of how programs compare, and whether these tests pass:
tools/bench_results/programs.json and .md. Rows of programs that do not run this time stay. `tools/programs` calls it in
the right environment."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.harness.programs import ROOT, WORDS, Case, ProgramError, exit_code_of, run
from tests.programs.frameworks.cases import CASES

RESULTS = Path(__file__).resolve().parent / "bench_results" / "programs"
PACKAGES = (
    "torch", "torchtitan", "accelerate", "transformers", "peft", "trl", "lightning", "torchao", "bitsandbytes",
    "pytorch-optimizer",
)  # fmt: skip
# Tests that are skipped where this package is not installed, by the name of their row.
TESTS = {
    "torchao: tests of float8": "tests/fully_shard/test_torchao.py",
    "torchao: tests of low-bit optimizers": "tests/features/test_block_states.py",  # bitsandbytes' are in it
    "pytorch-optimizer: tests of Shampoo": "tests/features/test_shampoo.py",
    "transformers: tests of Adafactor": "tests/features/test_adafactor.py",
}


def row_of_tests(name: str, limit: float) -> dict[str, Any]:
    """Whether the tests of that name pass, none skipped, within three times `limit` seconds."""
    row: dict[str, Any] = {"name": name, "ranks": 4, "arguments": [TESTS[name]], "bound": 0.0}
    command = [sys.executable, "-m", "pytest", "-q", "--processes", "1", TESTS[name]]
    with tempfile.TemporaryFile("w+") as printed:
        begun = time.monotonic()
        code = exit_code_of(command, printed, 3 * limit, cwd=ROOT)
        seconds = time.monotonic() - begun
        printed.seek(0)
        words = printed.read()
    passed = re.search(r"(\d+) passed", words)
    if code != 0 or passed is None or re.search(r"\d+ (skipped|failed|error)", words):
        ended = f"still ran after {3 * limit:g} s" if code is None else f"ended with {code}"
        return row | {"outcome": "failed", "error": f"{TESTS[name]} {ended}:\n{words[-WORDS:]}"}
    return row | {"outcome": f"{passed[1]} passed", "seconds": [0.0, seconds]}


def row_of(case: Case, limit: float) -> dict[str, Any]:
    row: dict[str, Any] = {"name": case.name, "ranks": case.ranks, "arguments": [case.program, *case.arguments]}
    row["bound"] = case.bound
    with tempfile.TemporaryDirectory(prefix="flatfsdp-program-") as folder:
        try:
            found = run(case, Path(folder), limit=limit)
        except ProgramError as error:
            return row | {"outcome": "failed", "error": str(error)}
    row |= {"largest": found.largest, "compared": found.compared, "problems": found.problems, "seconds": found.seconds}
    row["where"] = found.where
    if found.problems or not found.largest <= case.bound:
        return row | {"outcome": "differs"}
    return row | {"outcome": "equal to the bit" if found.largest == 0 else f"within {case.bound:g}"}


def versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"Python": platform.python_version(), **packages}


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def kept(path: Path) -> dict[str, dict[str, Any]]:
    """The existing rows, by their programs."""
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def chosen(program: str, name: str) -> bool:
    """Whether `name` is the name of a `program`, or a part of it and not another program's name."""
    known = [*(case.name for case in CASES), *TESTS]
    return program == name or (name in program and name not in known)


def table(found: dict[str, Any]) -> str:
    rows = found["rows"]
    good = sum(row["outcome"] not in ("failed", "differs") for row in rows)
    packages = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        "# Programs of other frameworks on flatfsdp",
        "",
        f"`tools/programs` with {packages}; gloo ranks on one CPU. {good} of {len(rows)} programs end as they do on "
        "torch's FSDP.",
        "",
        "Each program is one file that uses the released framework as it is, and runs once on torch's FSDP2 (FSDP1 "
        "where its name has that) and once under `python -m flatfsdp.as_torch`. "
        "Compared are the losses and gradient norms of every step and, on every rank, each parameter's shard, mesh, "
        "placements and shape at the end; FSDP1's flat parameters as whole ones. Where torch's cannot, its program "
        "does without: gathers in float8 on gloo, and offload, for which it pins memory, without an accelerator. "
        "Rows of tests are those of the suite that need the package; none may be skipped.",
        "",
        "| program | ranks | outcome | largest difference | numbers compared | date | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        largest = f"{row['largest']:.3g}" if math.isfinite(row.get("largest", math.nan)) else "-"
        numbers = f"{row.get('compared', 0):,} | {row['date']} | {row['commit']}"
        lines.append(f"| {row['name']} | {row['ranks']} | {row['outcome']} | {largest} | {numbers} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/programs", description=__doc__)
    parser.add_argument("names", nargs="*", help="run only programs whose names contain one of these")
    parser.add_argument("--limit", type=float, default=180, help="time limit of one run of a program, in seconds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="path of the table, without .json or .md")
    parser.add_argument("--list", action="store_true", help="list the programs")
    arguments = parser.parse_args()
    cases = [case for case in CASES if not arguments.names or any(chosen(case.name, each) for each in arguments.names)]
    tests = [each for each in TESTS if not arguments.names or any(chosen(each, name) for name in arguments.names)]
    if arguments.list:
        sys.stdout.write("".join(f"{each}\n" for each in (*(case.name for case in cases), *tests)))
        return 0
    data, written = (arguments.out.with_suffix(each) for each in (".json", ".md"))
    rows = kept(data)
    failed, order = False, [*(case.name for case in CASES), *TESTS]
    for each in (*cases, *tests):
        made = row_of(each, arguments.limit) if isinstance(each, Case) else row_of_tests(each, arguments.limit)
        row = made | {"date": today(), "commit": commit()}
        rows[row["name"]] = row
        sys.stdout.write(f"{row['outcome']:16}  {row['name']}\n")
        if row["outcome"] in ("failed", "differs"):
            failed = True
            sys.stdout.write(f"{row.get('error') or row['problems'] or (row['largest'], row['where'])}\n")
        sys.stdout.flush()
        found = {"versions": versions(), "rows": [rows[name] for name in order if name in rows]}
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text(json.dumps(found, indent=1) + "\n")
        written.write_text(table(found))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
