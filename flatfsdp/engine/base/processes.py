"""The identity of a process, by which another one finds out whether it still runs.

[Note: processes] A process id means nothing without the system that assigns it: the boot of the machine, and the
namespace of the container; several of these may share a host name. Where both are this process's own, the start time
of the process distinguishes it from a later one with the same id. For other systems, nothing can be known from here.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple


class ProcessIdentity(NamedTuple):
    """A process.

    Attributes:
        host: the name of its machine, for messages.
        system: as of `this_system`.
        pid: its process id.
        start: its start time, as of `start_of`.
    """

    host: str
    system: str
    pid: int
    start: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def this(cls) -> ProcessIdentity:
        """The identity of this process."""
        return cls(socket.gethostname(), this_system(), os.getpid(), start_of(os.getpid()) or "")

    @classmethod
    def of(cls, found: object) -> ProcessIdentity | None:
        """The identity that was decoded to `found`; None if it is not one."""
        match found:
            case [str(host), str(system), int(pid), str(start)] if pid > 0 and (host + system + start).isprintable():
                return cls(host, system, pid, start)
        return None

    def is_gone(
        self, observer: ProcessIdentity | None = None, find: Callable[[int], str | None] | None = None
    ) -> bool | None:
        """Whether the process has ended; None if that cannot be determined. [Note: processes]

        `observer`, `find`: for tests, the process that asks, and its `start_of`.
        """
        if not self.system or self.system != (this_system() if observer is None else observer.system):
            return None
        start = (find or start_of)(self.pid)
        if start is None:
            return True
        return start != self.start if start and self.start else None


def start_of(pid: int) -> str | None:
    """The start time of a process of this system, in clock ticks since the boot; empty where unknown, None where there
    is no such process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except (OSError, OverflowError):  # another user's
        pass
    try:
        # After the name, which is arbitrary: the state and, 19 fields later, the start.
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in ("Z", "X") else numbers[18]
    except (OSError, ValueError, IndexError):  # no such files here, or other users' are hidden
        return ""


@cache
def this_system() -> str:
    """A hash of the boot of this machine and of the namespace of this process's id; empty where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        known = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        # Without /proc, and so without namespaces, the network card identifies a machine; a random id has bit 40 set.
        node = 1 << 40 if sys.platform == "linux" else uuid.getnode()
        known = "" if node >> 40 & 1 else str(node)
    return known and hashlib.sha256(known.encode()).hexdigest()[:16]
