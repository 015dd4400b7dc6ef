"""Which process made a file, and whether it still runs: what locks and tokens beside checkpoints hold.

[Note: processes] A number of a process means nothing without the system that counts: the boot of the machine, and the
namespace of the container, of which several may have one host name. Where both are this process's own, the time at
which the process began distinguishes it from a later one of the same number. Elsewhere nothing is known from here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import sys
import time
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path

_JOBS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True)
class LockHolder:
    """A process, and one thing that it does.

    Attributes:
        host: the name of its machine.
        boot: a hash of the boot and the process namespace of its machine; empty where they are not known.
        pid: its number.
        start: when it began, in the machine's own count; empty where that is not known.
        job: words for people.
        token: names the one thing.
    """

    host: str
    boot: str
    pid: int
    start: str
    job: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}{f' ({self.job})' if self.job else ''}"

    def to_bytes(self) -> bytes:
        """One line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> LockHolder | None:
        """From what begins with such a line; None where it does not."""
        try:
            line = json.loads(data.partition(b"\n")[0])
            read = {field.name: line[field.name] for field in fields(cls)}
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        texts = [value for name, value in read.items() if name != "pid"]
        if (
            type(read["pid"]) is not int
            or read["pid"] < 1
            or not all(isinstance(text, str) and text.isprintable() for text in texts)
        ):
            return None
        return cls(**read)

    @property
    def name(self) -> str:
        """What `is_gone` needs, as a part of a file's name."""
        return f"{self.boot}-{self.pid}-{self.start}-{self.token}"

    @classmethod
    def from_name(cls, name: str) -> LockHolder | None:
        """From such a name; None where it is none."""
        found = re.fullmatch(r"([0-9a-f]*)-([1-9]\d*)-(\d*)-([0-9a-f]+)", name)
        return None if found is None else cls("", found[1], int(found[2]), found[3], "", found[4])


class Machine:
    """What this process knows of its machine. Tests stand in for another one.

    Attributes:
        host, boot, pid: as of `LockHolder`.
    """

    def __init__(self) -> None:
        self.host = socket.gethostname()
        self.boot = _boot()
        self.pid = os.getpid()

    def now(self) -> float:
        """Seconds of a clock that nobody sets."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Let this time go by."""
        time.sleep(seconds)

    def start_of(self, pid: int) -> str | None:
        """When a process of this machine began; empty where that is not to be known, None where there is none."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except (OSError, OverflowError):  # somebody else's
            pass
        try:
            # Behind the name, which may hold anything: the state, 19 fields later the start in ticks since the boot.
            state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return None if state in ("Z", "X") else numbers[18]
        except (OSError, ValueError, IndexError):  # no such files here, or others' are not shown
            return ""

    def holder(self) -> LockHolder:
        """This process, with a token of its own."""
        jobs = [f"{name} {os.environ[name]}" for name in _JOBS if name in os.environ]
        program = os.path.basename(sys.argv[0]) if sys.argv else ""
        words = "".join(filter(str.isprintable, ", ".join(filter(None, (program, *jobs)))))
        return LockHolder(self.host, self.boot, self.pid, self.start_of(self.pid) or "", words[:100], uuid.uuid4().hex)

    def is_gone(self, holder: LockHolder, busy: frozenset[str] | set[str]) -> bool | None:
        """Whether a process has ended, or, where it is this one, is not at its token any more; None: not to be known.

        Args:
            holder: the process.
            busy: the tokens that this process is at.
        """
        if not self.boot or self.boot != holder.boot:
            return None
        if holder.pid == self.pid and holder.token in busy:
            return False
        start = self.start_of(holder.pid)
        if start is None:
            return True
        if not start or not holder.start:
            return None
        return start != holder.start or holder.pid == self.pid


def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        known = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        # Without /proc, and so without namespaces, a machine goes by its network card; a random number has bit 40 set.
        node = 1 << 40 if sys.platform == "linux" else uuid.getnode()
        known = "" if node >> 40 & 1 else str(node)
    return known and hashlib.sha256(known.encode()).hexdigest()[:16]
