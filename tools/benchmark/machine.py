"""The machine of a measurement, and its other load in the meantime."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
QUIET = 0.05  # share of all cores used by other programs above which a round counts as disturbed


@dataclass
class Load:
    """One round: the load average (1 minute) around it, and the share of all cores that other programs used."""

    before: float
    after: float = 0.0
    others: float = 0.0

    @property
    def quiet(self) -> bool:
        """Whether the round was undisturbed."""
        return self.others <= QUIET


class Watch:
    """Watches the machine during a round. The CPU time of the benchmark's own processes is reported to `used`."""

    def __init__(self) -> None:
        self.load = Load(os.getloadavg()[0])
        self._start = _busy_and_all()
        self._own = 0.0

    def used(self, seconds: float) -> None:
        """Add the CPU seconds of a process of the benchmark."""
        self._own += seconds

    def end(self) -> dict[str, Any]:
        """End the round. Returned: its `Load` as a dictionary, with ``quiet``."""
        busy, total = (after - before for after, before in zip(_busy_and_all(), self._start, strict=True))
        self.load.others = max(0.0, busy - self._own) / max(total, 1e-9)
        self.load.after = os.getloadavg()[0]
        return {**asdict(self.load), "quiet": self.load.quiet}


def _busy_and_all() -> tuple[float, float]:
    """CPU seconds of all cores since boot: spent on programs, and in total."""
    with open("/proc/stat") as file:
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in file.readline().split()[1:]]
    user, nice, system, _idle, _waiting, irq, softirq, steal = ticks[:8]
    # `steal` is work of another machine on these cores: it disturbs like another program.
    return user + nice + system + irq + softirq + steal, sum(ticks[:8])


def describe(device: str) -> dict[str, Any]:
    """Versions, the date and the machine."""
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model[0].partition(":")[2].strip() if model else platform.processor(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def _commit() -> str:
    """The measured commit, marked if the engine differs from it."""

    def git(*arguments: str) -> str:
        try:
            ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
        except FileNotFoundError:  # no git
            return ""
        return ran.stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "unknown") + (
        "+" if git("status", "--porcelain", "--", "flatfsdp") else ""
    )
