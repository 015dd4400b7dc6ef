"""Stop a run early, with a checkpoint: signals, and requests of the program.

[Note: stopping] A signal, or a callback, requests a stop of one rank. It goes on with its step; the request is reduced
together with the loss, so that all ranks learn of it after the same step, and stop there, with a checkpoint. A second
signal of the same kind is not a request: it has the effect that it had before the run. A signal at most `ECHO_SECONDS`
after the first is a copy of it: programs that end a job (Slurm, systemd, `timeout`) signal all its processes, and the
process that started the ranks signals them, too.

A process that started the ranks forwards any signal to them as SIGTERM, with the number of the original (`meant_by`). A
terminal sends its SIGINT to all processes, so ranks leave it to the process that started them.

[Note: blocked main thread] Python handles signals in its main thread, between two of its own instructions. A thread
that is blocked in C, for example while it waits for a hanging rank, never gets there. Another thread reads signals from
a pipe: it announces the first at once, reports the place of a run that does not stop, and ends the process when a
second signal is not handled.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from types import FrameType
from typing import Any

from flatfsdp.messages import end_if_a_rank_is_lost
from flatfsdp.trainer.terminal import print_line

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # the last: sent by Slurm some time before the end
ECHO_SECONDS = 3.0
REPORT_SECONDS = 30.0  # from a request to the report of the place of the run
BLOCKED_SECONDS = 2.0  # for the main thread to handle a second signal
REQUESTED = 1  # the number of a request by the program; otherwise it is the signal's


class StopRequest:
    """Whether this rank is to stop.

    Attributes:
        number: 0 for no, `REQUESTED`, or the number of the signal.
    """

    def __init__(self) -> None:
        self.number = 0

    def request(self) -> None:
        """Request a stop from within the program; an earlier signal takes precedence."""
        self.number = self.number or REQUESTED

    @contextmanager
    def handling_signals(self, peers: Collection[int] = ()) -> Iterator[None]:
        """A context in which signals are requests. In threads other than the main one, it has no effect.

        Args:
            peers: the processes of other ranks on this machine. A signal after one of them has ended comes from the
                process that started the ranks: nothing is announced then, since no step will be completed. If a rank
                was lost, SIGTERM names it and ends this process (`flatfsdp.messages.end_if_a_rank_is_lost`).
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        came: dict[int, float] = {}

        def note(number: int, frame: FrameType | None) -> None:
            self.number = meant(number)
            if is_first(number, came):
                return
            relieved.set()
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)

        with handled_by(note) as before, _read_by_a_thread(before, peers) as relieved:
            yield


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[dict[signal.Signals, Any]]:
    """A context in which `handler` handles `SIGNALS` that are not ignored; yields their previous handlers."""
    before = {number: found for number in SIGNALS if (found := signal.getsignal(number)) is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, handler)
        yield before
    finally:
        for number, found in before.items():
            signal.signal(number, found)


@contextmanager
def _read_by_a_thread(numbers: Collection[int], peers: Collection[int]) -> Iterator[threading.Event]:
    """A context in which a thread reads signals of these `numbers`, even while the main thread is blocked ([Note:
    blocked main thread]). It yields an event for the main thread to set where it handles a second signal itself."""
    relieved = threading.Event()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # the descriptor of another library, or -1
    _pipes.add(write_end)
    given = (read_end, before, frozenset(numbers), relieved, threading.get_ident(), peers)
    thread = threading.Thread(target=_listen, args=given, name="flatfsdp signals", daemon=True)
    thread.start()
    try:
        yield relieved
    finally:
        relieved.set()
        signal.set_wakeup_fd(before)
        _pipes.discard(write_end)
        os.write(write_end, _END)  # closing would not end it while a forked process has the pipe, too
        thread.join()
        os.close(write_end)
        os.close(read_end)


def _listen(
    read_end: int,
    before: int,
    numbers: Collection[int],
    relieved: threading.Event,
    main: int,
    peers: Collection[int],
) -> None:
    came: dict[int, float] = {}
    report_at: float | None = None
    rank = os.environ.get("RANK", "0")
    while True:
        ready, _, _ = select([read_end], [], [], report_at and max(0.0, report_at - time.monotonic()))
        if not ready:
            words = f"was asked to stop {REPORT_SECONDS:.0f} s ago and is still at {_place_of(main)}"
            _print(f"[flatfsdp, rank {rank}] {words}")
            report_at = None
            continue
        received = os.read(read_end, 64)
        if before != -1 and (others := received.rstrip(_END)):
            with suppress(OSError):
                os.write(before, others)
        for number in (each for each in received if each in numbers):
            if not came:
                if number == signal.SIGTERM:
                    end_if_a_rank_is_lost()
                report_at = time.monotonic() + REPORT_SECONDS
                if rank == "0" and not any(map(_has_ended, peers)):  # for all ranks: they stop together
                    _print(f"{in_words(meant(number))}: stopping after this step, saving")
            if not is_first(number, came) and not relieved.wait(BLOCKED_SECONDS):
                ends = f"ends after a second {in_words(number)}, which its main thread did not handle: it was at"
                _print(f"[flatfsdp, rank {rank}] {ends} {_place_of(main)}")
                os._exit(128 + number)
        if received.endswith(_END):
            return


def _has_ended(process: int) -> bool:
    return state_of(process) in ("Z", "X")  # Z: its parent has not seen that yet


def state_of(process: int) -> str:
    """The letter of a process's state as in `ps`; X where it has ended, "" where it is unknown."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return "X"
    except OSError:  # of another user, or no Linux
        return ""


def _place_of(thread: int) -> str:
    """The call stack of a thread, the innermost call last."""
    stack = traceback.extract_stack(sys._current_frames().get(thread))
    return " > ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in stack[-4:])


def _print(words: str) -> None:
    with suppress(OSError, ValueError):
        print_line(words)


_END = b"\0"  # not the number of a signal
_pipes: set[int] = set()


def _leave_pipe() -> None:
    """Detach a forked process, such as a data worker, from its parent's pipe: it has separate signals."""
    with suppress(ValueError):  # forked from another thread: such a child does not handle signals
        found = signal.set_wakeup_fd(-1)
        if found != -1 and found not in _pipes:
            signal.set_wakeup_fd(found)


os.register_at_fork(after_in_child=_leave_pipe)


def is_first(number: int, came: dict[int, float]) -> bool:
    """Whether a signal is the first of its kind, or a copy of it; `came` has the arrival of the first."""
    now = time.monotonic()
    return now - came.setdefault(number, now) < ECHO_SECONDS


_meant: Any = None


def meant_by(value: Any) -> None:
    """Interpret arriving signals as the one with number `value.value`, unless that is 0. [Note: stopping]"""
    global _meant
    _meant = value


def meant(number: int) -> int:
    """The original of an arriving signal."""
    return (_meant.value or number) if _meant is not None else number


def in_words(number: int) -> str:
    """The name of a request: "SIGTERM", or "the program"."""
    return "the program" if number == REQUESTED else signal.Signals(number).name
