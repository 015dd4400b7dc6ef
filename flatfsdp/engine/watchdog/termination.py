"""The end of this process by SIGTERM, after one line if another rank was lost.

[Note: termination] A launcher that finds a rank dead (torchrun, `torch.multiprocessing.spawn`) sends SIGTERM to the
others some 0.1 s later: before a lost connection is explained ([Note: watch]), or while they compute and know nothing.
So in programs that leave SIGTERM its default effect, a thread first looks up which ranks of this machine are gone,
names them in one line, and then the signal has that effect: the exit status is the same, within `LOOKUP` seconds.
Nothing is printed if no rank was lost: a scheduler that ends a job signals all its ranks, and each leaves a note before
it ends.

The handler is that of `faulthandler`, which writes to a pipe without the interpreter: the main thread may be blocked in
C. For Python the signal still has its default effect: a program sees that, and a handler that it sets, at any time,
replaces ours. A fork suspends it, and the new process does not get it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import threading
from typing import NamedTuple

from ...errors import LostRankError
from ..base.foreign_text import parse
from ..base.processes import ProcessIdentity
from . import status_report as reports
from .process_exit import at_end, explainers, print_immediately
from .store import StoreClient
from .watchdog import is_lost_connection

LOOKUP = 2.0  # seconds that the lookup may delay the end
MOST = 64  # ranks that are looked up
NOTICED = 0.5  # seconds from a broken connection until the process at its other end is gone


class _World(NamedTuple):
    """The ranks to look up, as seen by this one."""

    store: StoreClient
    rank: int
    size: int

    def lost(self) -> list[reports.ExitRecord]:
        """The ranks of this machine that were killed, and all that reported an error as their end. Reports the former
        to all ranks. Some requests to the store per rank of this machine."""
        here = {rank: parse(self.store.read(f"here/{rank}")) for rank in _ranks_here(self.rank, self.size)}
        found = {rank: process for rank, each in here.items() if (process := ProcessIdentity.of(each))}
        gone = {rank: process for rank, process in found.items() if rank != self.rank and process.is_gone()}
        killed = [rank for rank in gone if self.store.read(f"signaled/{rank}") is None]
        ended = reports.ExitRecord.read_all(self.store)
        lost = [each for each in ended.values() if each.rank != self.rank and not each.is_normal]
        unreported = [rank for rank in killed if rank not in ended]
        lost += [reports.report_gone(self.store, rank, gone[rank], by=self.rank) for rank in unreported]
        return sorted(lost)


_world: _World | None = None
_pipe: tuple[int, int] | None = None


def explain_termination(store: StoreClient, rank: int, size: int) -> None:
    """From now on, a SIGTERM that would end this process first prints the ranks that were lost. No effect where
    SIGTERM is handled or blocked, and where the state of other processes is not known (without Linux)."""
    global _world, _pipe
    _world = _World(store, rank, size) if size > 1 else None
    if _world is None or not _has_default_effect():
        return
    if _pipe is None:
        _pipe = os.pipe()
        os.set_blocking(_pipe[1], False)
        threading.Thread(target=_listen, args=(_pipe[0],), name="flatfsdp termination", daemon=True).start()
    _disarm()  # a handler of the program may have replaced it, and be gone
    _arm()
    at_end(lambda error: release())


def release() -> None:
    """Give SIGTERM its default effect again, unless the program has set a handler: this process ends by itself."""
    global _world
    _world = None
    _disarm()


def _arm() -> None:
    assert _pipe is not None
    faulthandler.register(signal.SIGTERM, file=_pipe[1], all_threads=False)


def _disarm() -> None:
    if _pipe is not None and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # else the program's has replaced it
        faulthandler.unregister(signal.SIGTERM)


def end_if_a_rank_is_lost() -> None:
    """For a program's own handler of SIGTERM: if a rank was lost, print one line that names it, and end this process as
    SIGTERM does by default, without callbacks of the interpreter.

    Such a signal comes from a launcher, and no step can be completed any more. Returns if no rank is known to be lost,
    within 2 seconds. Not collective; in any thread.
    """
    if sentence := _explanation(goes_on=True):
        print_immediately(sentence)
        ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # Python's own function is for the main thread only
        os.kill(os.getpid(), signal.SIGTERM)


def _listen(read_end: int) -> None:
    while os.read(read_end, 1 << 16):
        if sentence := _explanation():
            print_immediately(sentence)
        release()
        os.kill(os.getpid(), signal.SIGTERM)


def _explanation(patience: float = 0.0, *, goes_on: bool = False) -> str:
    """The line that names the ranks that were lost; "" for none. Takes `LOOKUP` seconds at most: the store may not
    answer. `patience`: seconds to wait for a rank to end; `goes_on`: this process does if none was lost."""
    world, over = _world, threading.Event()
    lost: list[reports.ExitRecord] = []

    def look_up(world: _World) -> None:
        try:
            lost.extend(world.store.wait(world.lost, patience))
            if lost or not goes_on:
                world.store.post(f"signaled/{world.rank}", "")  # others may look for this process when it is gone
        except RuntimeError:  # the store is gone
            pass
        finally:
            over.set()

    if world is not None:
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end, and starts no threads
            threading.Thread(target=look_up, args=(world,), name="flatfsdp lookup", daemon=True).start()
            over.wait(LOOKUP)
        if lost:
            sentence = reports.in_one_sentence(lost, {}, rank=world.rank)
            return f"[flatfsdp, rank {world.rank}] {LostRankError.__name__}: {sentence}"
    return ""


def _explain_at_end(error: BaseException) -> str:
    """A connection that broke in a collective of the program's own ends the program in the backend's words."""
    return _explanation(patience=NOTICED) if is_lost_connection(error) else ""


explainers.append(_explain_at_end)


def _ranks_here(rank: int, size: int) -> range:
    """The ranks of this machine by the environment variables of launchers, or all; `MOST` at most."""
    with contextlib.suppress(KeyError, ValueError):
        first = rank - int(os.environ["LOCAL_RANK"])
        return range(max(0, first), min(size, first + min(MOST, int(os.environ["LOCAL_WORLD_SIZE"]))))
    return range(min(size, MOST))


def _has_default_effect() -> bool:
    """Whether SIGTERM ends this process, as far as Python and Linux know: libraries may have set a handler in C."""
    number = signal.SIGTERM
    if signal.getsignal(number) != signal.SIG_DFL or number in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return False
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        masks = dict(line.split(":") for line in file if line.startswith("Sig") and line.count(":") == 1)
        return "SigCgt" in masks and not int(masks["SigCgt"], 16) >> (number - 1) & 1
    return False


def _after_fork_in_parent() -> None:
    if _pipe is not None and _world is not None and _has_default_effect():
        _arm()


def _after_fork_in_child() -> None:
    """The thread that listens is not there. Another thread of the parent may have armed it in the meantime."""
    global _pipe
    release()
    for end in _pipe or ():
        os.close(end)
    _pipe = None


# A new process could be signaled before it can do anything, and would signal its parent through the pipe.
os.register_at_fork(before=_disarm, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
