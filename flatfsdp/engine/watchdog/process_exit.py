"""The end of this process, reported to those who notify the other ranks.

[Note: process end] A program ends by an exception that reaches the interpreter (`sys.excepthook`) or that a process of
`multiprocessing` catches (where finalizers see it, or the `SystemExit` that torch's `mp.spawn` makes of it), or it ends
without one: finalizers run at the end of the interpreter, too. What kills a process at once, and `os._exit`, goes
unheard.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType

GRACE = 4.0  # seconds that a blocked main thread gets to come back before its process is ended

ExitCallback = Callable[["BaseException | None"], None]

explainers: list[Callable[[BaseException], str]] = []
"""What has words for exceptions of others that end the program, printed after them; "" for none."""

_callbacks: list[ExitCallback] = []
_process: int | None = None  # whose end has to be reported; a fork of it ends on its own account


def at_end(callback: ExitCallback) -> None:
    """Call `callback` once, when this process ends, with the exception that ends it or None."""
    global _process
    _callbacks.append(callback)
    if _process is None:
        _process = os.getpid()
        _chain_excepthook()
        multiprocessing.util.Finalize(None, _at_end_of_process, exitpriority=0)


def in_words(error: BaseException) -> str:
    """The class and text of `error`, not more than some lines of it."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return text if len(text) < 500 else f"{text[:500]} ..."


def print_immediately(sentence: str) -> None:
    """Print `sentence` at once, whatever the main thread is doing."""
    with contextlib.suppress(OSError, ValueError):
        print(sentence, file=sys.stderr, flush=True)


def end_process_unless(come_back: Callable[[], bool]) -> None:
    """End this process with status 1 if `come_back()` does not turn true within `GRACE` seconds (on the thread)."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        if come_back():
            return
        time.sleep(0.05)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(1)


def _chain_excepthook() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            before(kind, error, trace)
            for explain in explainers:
                if words := explain(error):
                    print(words, file=sys.stderr, flush=True)
        finally:
            _notify(error)

    sys.excepthook = hook


def _at_end_of_process() -> None:
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        if error.__context__ is not None:  # what the exit was made of
            error = error.__context__
        elif not error.code:
            error = None
    _notify(error)


def _notify(error: BaseException | None) -> None:
    while _callbacks and _process == os.getpid():
        _callbacks.pop()(error)
