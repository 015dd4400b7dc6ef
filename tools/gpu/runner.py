"""Runs parts, each a process with a limit, all within one budget; writes the newest results.

Those that time nothing run side by side, limited by the number of processors. A part that dies, hangs or is ended
leaves its findings so far. Parts for which no time is left are listed as not run.
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
POLL = 0.5  # seconds between two polls of a part
SIDE_BY_SIDE = min(4, max(1, (os.cpu_count() or 1) // 4))  # parts that time nothing
ENDS = "runs to its end"


@dataclass
class Outcome:
    """A part and its outcome."""

    part: str
    title: str
    seconds: float = 0.0
    found: Findings = field(default_factory=Findings)

    @property
    def unmet(self) -> int:
        """The number of unmet goals."""
        return sum(row.met is False for row in self.found.rows)

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain data."""
        return {"part": self.part, "title": self.title, "seconds": round(self.seconds, 1), **asdict(self.found)}


def command_of(part: Part, path: Path, folder: Path, device: str, brief: bool) -> list[str]:
    """The command that starts `part`, which writes its findings to `path` and other files to `folder`."""
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
    """Run `parts`; `write` is called for every new finding."""
    deadline = time.monotonic() + budget
    outcomes: list[Outcome] = []
    running: list[_Running] = []
    try:
        for part in parts:
            while running and (part.timed or running[0].part.timed or len(running) >= SIDE_BY_SIDE):
                running = _look_at(running, log, lambda: write(outcomes))
            outcomes.append(outcome := Outcome(part.name, part.title))
            left = deadline - time.monotonic()
            if left < LEAST:
                words = f"not run: {left:.0f} s of the budget were left"
                outcome.found.rows.append(Row("the part itself", ENDS, words, None))
            else:
                print(f"-- {part.name}: {part.title} (at most {min(part.seconds, left):.0f} s)", flush=True)
                running.append(_Running(part, outcome, command, scratch, min(part.seconds, left)))
            write(outcomes)
        while running:
            running = _look_at(running, log, lambda: write(outcomes))
    finally:  # on an interrupt
        for each in running:
            each.end()
    return outcomes


def _look_at(running: list[_Running], log: Path, write: Callable[[], None]) -> list[_Running]:
    """Poll once. Returned: the parts that are still running."""
    time.sleep(POLL)
    return [each for each in running if each.look(log, write)]


class _Running:
    """A running part."""

    def __init__(
        self, part: Part, outcome: Outcome, command: Callable[[Part, Path], list[str]], scratch: Path, seconds: float
    ) -> None:
        self.part, self._outcome, self._limit = part, outcome, seconds
        self._found, self._log = scratch / f"{part.name}.json", scratch / f"{part.name}.log"
        self._begun, self._seen = time.monotonic(), -1
        with open(self._log, "wb") as output:
            self._process = subprocess.Popen(
                command(part, self._found), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def look(self, log: Path, write: Callable[[], None]) -> bool:
        """Read new findings. Returned: whether the part is still running."""
        seconds = time.monotonic() - self._begun
        runs = self._process.poll() is None
        if runs and seconds <= self._limit:
            self._seen = _news(self._outcome, self._found, self._seen, write)
            return True
        self.end()
        self._outcome.seconds = seconds
        _news(self._outcome, self._found, self._seen, write)
        with open(log, "ab") as output:
            output.write(f"\n==== {self.part.name} ====\n".encode() + self._log.read_bytes())
        words = f"ended after its {self._limit:.0f} s" if runs else ""
        if not runs and self._process.returncode:
            words = f"died with status {self._process.returncode}; {log.name} has its output"
        if words:
            print(f"FAIL {self.part.name} {words}", flush=True)
            self._outcome.found.rows.append(Row("the part itself", ENDS, words, False))
        write()
        return False

    def end(self) -> None:
        """End the part and all processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _news(outcome: Outcome, path: Path, seen: int, write: Callable[[], None]) -> int:
    """Print new findings of a part. Returned: the number of its rows."""
    found = Findings.read(path)
    if len(found.rows) > max(seen, 0):
        for row in found.rows[max(seen, 0) :]:
            sign = {True: "ok  ", False: "FAIL", None: "    "}[row.met]
            print(f"{sign} {outcome.part}: {row.what}: {row.found}", flush=True)
    outcome.found = found
    if len(found.rows) != seen:
        write()
    return len(found.rows)
