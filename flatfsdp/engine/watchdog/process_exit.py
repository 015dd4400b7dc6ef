"""Callbacks at the end of this process, with which the other ranks are notified.

[Note: process end] A program ends by an exception that reaches the interpreter (`sys.excepthook`) or that a process of
`multiprocessing` catches (where finalizers see it, or the `SystemExit` into which torch's `mp.spawn` turns it), or it
ends without one: finalizers also run at the exit of the interpreter. An end by a fatal signal, or by `os._exit`, is not
noticed here.
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

GRACE = 4.0  # seconds that a blocked main thread has to return before its process is ended

ExitCallback = Callable[["BaseException | None"], None]

explainers: list[Callable[[BaseException], str]] = []
"""Functions that return an explanation of an exception that ends the program, printed after it; "" for none."""

_callbacks: list[ExitCallback] = []
_process: int | None = None  # the process whose end is reported; ends of its forks are not


def at_end(callback: ExitCallback) -> None:
    """Call `callback` once, when this process ends, with the exception that ends it or None."""
    global _process
    _callbacks.append(callback)
    if _process is None:
        _process = os.getpid()
        _chain_excepthook()
        multiprocessing.util.Finalize(None, _at_end_of_process, exitpriority=0)


def in_words(error: BaseException) -> str:
    """The class and text of `error`, shortened to 500 characters."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return text if len(text) < 500 else f"{text[:500]} ..."


def print_immediately(sentence: str) -> None:
    """Print `sentence` to standard error and flush it, from any thread."""
    with contextlib.suppress(OSError, ValueError):
        print(sentence, file=sys.stderr, flush=True)


def end_process_unless(come_back: Callable[[], bool]) -> None:
    """End this process with status 1 unless `come_back()` returns true within `GRACE` seconds; blocks until then."""
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

    def hook(cls: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            before(cls, error, trace)
            for explain in explainers:
                if words := explain(error):
                    print(words, file=sys.stderr, flush=True)
        finally:
            _notify(error)

    sys.excepthook = hook


def _at_end_of_process() -> None:
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        if error.__context__ is not None:  # the exception that led to the exit
            error = error.__context__
        elif not error.code:
            error = None
    _notify(error)


def _notify(error: BaseException | None) -> None:
    while _callbacks and _process == os.getpid():
        _callbacks.pop()(error)
