"""The end of the interpreter, seen from native threads that still need it.

[Note: at exit] A worker thread of gloo lets go of an operation's tensors a moment after the operation was waited for.
If Python has let go of them before, they end there, which takes the interpreter's lock; and a native thread that asks
for that lock once the interpreter is ending is unwound through C++ that cannot be unwound: "terminate called without
an active exception", SIGABRT, when all work was done. (`destroy_process_group()` joins the workers only if nothing
holds the group; torch's own modules do, those imported after it was made.) So the interpreter's end waits until no
worker is at work.
"""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Iterator
from pathlib import Path

WORKER = "pt_gloo_runloop"  # what torch names the threads, as Linux cuts names
SECONDS = 2.0  # at most; a worker in an operation that never ends sleeps


def wait_for_workers(seconds: float = SECONDS) -> None:
    """Return when no worker thread of gloo is running, or after that many seconds.

    Who sleeps is idle, waits for a peer or for the interpreter's lock, which is free in here.
    """
    deadline = time.monotonic() + seconds
    time.sleep(0.001)  # even where threads cannot be listed
    while time.monotonic() < deadline and any(state == "R" for state in _states()):
        time.sleep(0.001)


def _states() -> Iterator[str]:
    """What worker threads do, in the letters of Linux; nothing on other systems."""
    for task in Path("/proc/self/task").glob("*"):
        try:
            _, name, rest = (task / "stat").read_text().replace(")", "(").split("(", 2)
        except (OSError, ValueError):  # it has just ended, or is named otherwise
            continue
        if name == WORKER:
            yield rest.split()[0]


@functools.cache
def install() -> None:
    """Let the end of the interpreter wait, once however often this is called."""
    atexit.register(wait_for_workers)
