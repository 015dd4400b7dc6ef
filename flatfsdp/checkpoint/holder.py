"""The process that made a file, and whether it still runs: the contents of locks and tokens next to checkpoints.

[Note: processes] A process id means nothing without the system that assigns it: the boot of the machine, and the
namespace of the container; several of these may share a host name. Where both are this process's own, the start time
of the process distinguishes it from a later one with the same id. For other systems, nothing can be known from here.
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
    """A process, and one operation of it.

    Attributes:
        host: the name of its machine.
        boot: a hash of the boot and the process namespace of its machine; empty where unknown.
        pid: its process id.
        start: its start time, in the machine's own count; empty where unknown.
        job: a description for messages.
        token: identifies the operation.
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
        """Serialize to one line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> LockHolder | None:
        """Read from data that begins with such a line; None where it does not."""
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
        """The fields that `is_gone` needs, as a part of a file's name."""
        return f"{self.boot}-{self.pid}-{self.start}-{self.token}"

    @classmethod
    def from_name(cls, name: str) -> LockHolder | None:
        """Read from such a name; None for any other."""
        found = re.fullmatch(r"([0-9a-f]*)-([1-9]\d*)-(\d*)-([0-9a-f]+)", name)
        return None if found is None else cls("", found[1], int(found[2]), found[3], "", found[4])


class Machine:
    """The machine as this process sees it. Tests simulate another one.

    Attributes:
        host, boot, pid: as of `LockHolder`.
    """

    def __init__(self) -> None:
        self.host = socket.gethostname()
        self.boot = _boot()
        self.pid = os.getpid()

    def now(self) -> float:
        """Seconds of a monotonic clock."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def start_of(self, pid: int) -> str | None:
        """The start time of a process of this machine; empty where unknown, None where there is no such process."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except (OSError, OverflowError):  # another user's
            pass
        try:
            # After the name, which is arbitrary: the state and, 19 fields later, the start in ticks since the boot.
            state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return None if state in ("Z", "X") else numbers[18]
        except (OSError, ValueError, IndexError):  # no such files here, or other users' are hidden
            return ""

    def holder(self) -> LockHolder:
        """This process, with a new token."""
        jobs = [f"{name} {os.environ[name]}" for name in _JOBS if name in os.environ]
        program = os.path.basename(sys.argv[0]) if sys.argv else ""
        words = "".join(filter(str.isprintable, ", ".join(filter(None, (program, *jobs)))))
        return LockHolder(self.host, self.boot, self.pid, self.start_of(self.pid) or "", words[:100], uuid.uuid4().hex)

    def is_gone(self, holder: LockHolder, busy: frozenset[str] | set[str]) -> bool | None:
        """Whether a process has ended, or, where it is this one, the operation of its token; None where unknown.

        Args:
            holder: the process.
            busy: the tokens of operations that this process has in progress.
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
        # Without /proc, and so without namespaces, the network card identifies a machine; a random id has bit 40 set.
        node = 1 << 40 if sys.platform == "linux" else uuid.getnode()
        known = "" if node >> 40 & 1 else str(node)
    return known and hashlib.sha256(known.encode()).hexdigest()[:16]
