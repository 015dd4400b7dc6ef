"""Runs parts one after the other, each a process with a limit, all within one budget; writes the newest results.

A part that dies, hangs or is ended leaves what it had found. What no time is left for is listed as not run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .parts import ROOT, Part
from .report import Findings, Row

LEAST = 10.0  # seconds below which a part is not begun
POLL = 0.5  # seconds between two looks at a part
ENDS = "runs to its end"


@dataclass
class Outcome:
    """A part and what came of it."""

    part: str
    title: str
    seconds: float = 0.0
    found: Findings = field(default_factory=Findings)

    @property
    def unmet(self) -> int:
        """How many goals are not met."""
        return sum(row.met is False for row in self.found.rows)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"part": self.part, "title": self.title, "seconds": round(self.seconds, 1), **asdict(self.found)}


def command_of(part: Part, path: Path, folder: Path, device: str, brief: bool) -> list[str]:
    """What starts `part`, which writes its findings to `path` and what else it makes to `folder`."""
    words = [
        sys.executable,
        "-m",
        "tools.gpu",
        part.name,
        "--found",
        str(path),
        "--out",
        str(folder),
        "--device",
        device,
    ]
    return [*words, "--brief"] if brief else words


def run_all(
    parts: Sequence[Part],
    command: Callable[[Part, Path], list[str]],
    scratch: Path,
    log: Path,
    budget: float,
    write: Callable[[list[Outcome]], None],
) -> list[Outcome]:
    """Run `parts`; `write` is called whenever there is something new."""
    deadline = time.monotonic() + budget
    outcomes: list[Outcome] = []
    for part in parts:
        outcome = Outcome(part.name, part.title)
        outcomes.append(outcome)
        left = deadline - time.monotonic()
        if left < LEAST:
            outcome.found.rows.append(
                Row("the part itself", ENDS, f"not run: {left:.0f} s of the budget were left", None)
            )
        else:
            print(f"-- {part.name}: {part.title} (at most {min(part.seconds, left):.0f} s)", flush=True)
            _run(
                part,
                outcome,
                command,
                scratch / f"{part.name}.json",
                log,
                min(part.seconds, left),
                lambda: write(outcomes),
            )
        write(outcomes)
    return outcomes


def _run(
    part: Part,
    outcome: Outcome,
    command: Callable[[Part, Path], list[str]],
    path: Path,
    log: Path,
    seconds: float,
    write: Callable[[], None],
) -> None:
    begun, seen, ended = time.monotonic(), -1, ""
    with open(log, "ab") as output:
        output.write(f"\n==== {part.name} ====\n".encode())
        output.flush()
        process = subprocess.Popen(
            command(part, path), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                if time.monotonic() - begun > seconds:
                    ended = f"ended after its {seconds:.0f} s"
                    break
                time.sleep(POLL)
                seen = _news(outcome, path, seen, write)
        finally:
            _end(process)
    outcome.seconds = time.monotonic() - begun
    _news(outcome, path, seen, write)
    if not ended and process.returncode:
        ended = f"died with status {process.returncode}; {log.name} has its output"
    if ended:
        print(f"FAIL {part.name} {ended}", flush=True)
        outcome.found.rows.append(Row("the part itself", ENDS, ended, False))


def _news(outcome: Outcome, path: Path, seen: int, write: Callable[[], None]) -> int:
    """What a part has found since it was looked at: how many rows there are."""
    found = Findings.read(path)
    if len(found.rows) > max(seen, 0):
        for row in found.rows[max(seen, 0) :]:
            sign = {True: "ok  ", False: "FAIL", None: "    "}[row.met]
            print(f"{sign} {row.what}: {row.found}", flush=True)
    outcome.found = found
    if len(found.rows) != seen:
        write()
    return len(found.rows)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and whatever it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
