"""A name for one start of a job's processes.

[Note: starts] torchrun starts ranks again in front of the same store, after a failure or with more or fewer nodes. In
it stands what the ranks before have left: ends that they reported, meetings that they had. Nothing in the environment
distinguishes one start from the next on all nodes, and a rank may look at the store alone, so no collective can bring a
name. Time does: a launcher starts processes when those of the start before have ended, and ranks look at the store once
their process group is there, which takes all of them. The first rank that looks claims a name; one that was claimed
before a process was started is of an earlier start, for it and for all that were started with it.

Ranks of one machine compare by the clock since it was booted, those of several by the time of day: it has to be right
to about a second there, the time in which a process starts. Where a process cannot find out when it was started
(without Linux) it takes the name that stands there.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from typing import Any, NamedTuple

from ..base.foreign_text import parse

PLACE = "start"  # of the claim
TRIES = 8  # others may claim meanwhile, and what others write may be anything


class Moment(NamedTuple):
    """When something was, by two clocks.

    Attributes:
        machine: the boot of a machine that `since_boot`, in seconds, counts from; "" where it is not known.
        time: of day, in seconds.
    """

    machine: str
    since_boot: float
    time: float

    @classmethod
    def now(cls) -> Moment:
        """This one."""
        if not (machine := _machine()):
            return cls("", 0.0, time.time())
        return cls(machine, time.clock_gettime(time.CLOCK_BOOTTIME), time.time())

    def is_before(self, other: Moment) -> bool:
        """Whether it was earlier."""
        if self.machine and self.machine == other.machine:
            return self.since_boot < other.since_boot
        return self.time < other.time


class Claim(NamedTuple):
    """The name that somebody gave a start, and when."""

    name: str
    at: Moment

    @classmethod
    def of(cls, text: str) -> Claim | None:
        """The claim of that `text`, None if it is none."""
        match parse(text):
            case [str(name), [str(machine), int() | float() as since_boot, int() | float() as seconds]]:
                return cls(name, Moment(machine, since_boot, seconds))
        return None


def state_of(pid: int) -> tuple[str, str]:
    """The letter of a process's state and when it was started, by Linux; two times "" where there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def started_at() -> Moment | None:
    """When this process was started; None where it cannot find out."""
    now, (_, ticks) = Moment.now(), state_of(os.getpid())
    if not (now.machine and ticks):
        return None
    since_boot = int(ticks) / os.sysconf("SC_CLK_TCK")
    return Moment(now.machine, since_boot, now.time - (now.since_boot - since_boot))


def name_of_this_start(store: Any) -> str:
    """The name in `store` of the start that this process belongs to, which it claims if nobody has. One or two
    requests."""
    started, own = started_at(), json.dumps(Claim(uuid.uuid4().hex, Moment.now()))
    expected = ""
    for _ in range(TRIES):
        found = store.compare_set(PLACE, expected, own).decode(errors="replace")
        claim = Claim.of(found)
        if claim is not None and (started is None or not claim.at.is_before(started)):
            return claim.name
        expected = found
    return "unnamed"  # somebody writes there what is no claim, for all ranks


def _machine() -> str:
    """What distinguishes the clock since boot of this machine from those of others; "" where it is not known."""
    with contextlib.suppress(OSError, AttributeError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/time')}"
    return ""
