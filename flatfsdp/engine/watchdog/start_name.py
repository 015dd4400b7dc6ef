"""A name for one start of a job's processes.

[Note: starts] torchrun restarts ranks with the same store, after a failure or with more or fewer nodes. The store then
still has the notes of earlier ranks: ends that they reported, meetings that they held. No environment variable
distinguishes one start from the next on all nodes, and a rank may access the store alone, so a collective cannot
distribute a name. Times can: a launcher starts processes after those of the previous start have ended, and ranks access
the store after their process group exists, which requires all of them. The first rank to do so claims a name. A name
that was claimed before a process was started belongs to an earlier start, for all processes of the current one.

Ranks on one machine compare times since boot, ranks on several machines the time of day: clocks have to agree to about
a second, the time in which a process starts. A process that cannot determine its start (without Linux) uses the name in
the store.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from typing import Any, NamedTuple

from ..base.foreign_text import parse
from ..base.processes import start_of, this_system

PLACE = "start"  # the key of the claim
TRIES = 8  # others may claim in the meantime, or write anything else there


class Moment(NamedTuple):
    """A point in time, by two clocks.

    Attributes:
        system: as of `this_system`; since_boot: seconds on its clock. Both are empty where it has none.
        time: the time of day, in seconds.
    """

    system: str
    since_boot: float
    time: float

    @classmethod
    def now(cls) -> Moment:
        """The current time."""
        if not (system := this_system()) or not hasattr(time, "CLOCK_BOOTTIME"):
            return cls("", 0.0, time.time())
        return cls(system, time.clock_gettime(time.CLOCK_BOOTTIME), time.time())

    def is_before(self, other: Moment) -> bool:
        """Whether it is earlier than `other`."""
        if self.system and self.system == other.system:
            return self.since_boot < other.since_boot
        return self.time < other.time


class Claim(NamedTuple):
    """A claimed name of a start, and the time of the claim."""

    name: str
    at: Moment

    @classmethod
    def of(cls, text: str) -> Claim | None:
        """The claim that `text` has; None if it is not a claim."""
        match parse(text):
            case [str(name), [str(system), int() | float() as since_boot, int() | float() as seconds]]:
                return cls(name, Moment(system, since_boot, seconds))
        return None


def started_at() -> Moment | None:
    """The time at which this process was started; None if that cannot be determined."""
    now, ticks = Moment.now(), start_of(os.getpid())
    if not (now.system and ticks):
        return None
    since_boot = int(ticks) / os.sysconf("SC_CLK_TCK")
    return Moment(now.system, since_boot, now.time - (now.since_boot - since_boot))


def name_of_this_start(store: Any) -> str:
    """The name in `store` of the start that this process belongs to, which it claims if no rank has. One or two
    requests."""
    started, own = started_at(), json.dumps(Claim(uuid.uuid4().hex, Moment.now()))
    expected = ""
    for _ in range(TRIES):
        found = store.compare_set(PLACE, expected, own).decode(errors="replace")
        claim = Claim.of(found)
        if claim is not None and (started is None or not claim.at.is_before(started)):
            return claim.name
        expected = found
    return "unnamed"  # the key is overwritten by other code, so no rank finds a claim
