"""Sleeping until a peer makes progress, and waking sleeping peers.

[Note: bell] Every rank has one word that its peers change, and on which it sleeps (`futex(2)`) in all of its waits.
The word never has the same value twice, so the kernel detects a change between a check of the counters and the sleep. A
peer that changes the word makes the system call only if a thread sleeps.

[Note: barriers] Data are written before the counter that publishes them, and on x86 stores become visible in program
order to readers that load in that order; the C library ends copies by non-temporal stores, which would not, with an
`sfence`. A counter is aligned, and is read and written by one instruction. However, x86 may reorder a store and a later
load: "I have posted" and "does my peer sleep?" on one side, "I sleep" and "what has my peer posted?" on the other.
`_barrier` separates the two: it acquires and releases a lock, which takes a locked instruction. Other processors need
more barriers, and use gloo instead.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref
from functools import cache

from .segments import MemorySegment, create

SIZE = 4096
_WORD, _SLEEPS = 0, 16  # indices of 32-bit words, in cache lines of their own
_FUTEX = 202  # the number of the system call on x86-64
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**30
_lock = threading.Lock()


def _barrier() -> None:
    with _lock:
        pass


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """The mapped word of one process."""

    def __init__(self, segment: MemorySegment) -> None:
        self._segment = segment
        self._words = memoryview(segment.memory).cast("I")
        self._address = ctypes.c_void_p(segment.bytes.data_ptr() + 4 * _WORD)

    def ring(self, value: int) -> None:
        """Wake the bell's process, if it sleeps; no two rings of a bell have the same 32-bit `value`."""
        words = self._words
        words[_WORD] = value
        _barrier()
        if words[_SLEEPS]:
            _system().syscall(_FUTEX, self._address, _WAKE, _EVERYBODY, None, None, 0)


class OwnBell(Bell):
    """The bell of this process.

    Attributes:
        descriptor: the file descriptor of its segment, for peers. close: closes it; called when the bell is freed.
    """

    def __init__(self) -> None:
        self.descriptor = create(SIZE)
        self.close = weakref.finalize(self, os.close, self.descriptor)
        self._sleepers = 0  # threads
        super().__init__(MemorySegment(self.descriptor, SIZE))

    def look(self) -> int:
        """The word now. From here on peers make the system call, so check the awaited condition after this call."""
        with _lock:
            self._sleepers += 1
            self._words[_SLEEPS] = self._sleepers
        _barrier()
        return self._words[_WORD]

    def sleep(self, seen: int, seconds: float) -> None:
        """Sleep until a peer rings, at most for `seconds`; return at once if the word is no longer `seen`."""
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        _system().syscall(_FUTEX, self._address, _WAIT, ctypes.c_uint(seen), ctypes.byref(limit), None, 0)

    def wake(self) -> None:
        """Mark this thread as awake; to be called once for each `look`."""
        with _lock:
            self._sleepers -= 1
            self._words[_SLEEPS] = self._sleepers


_own: weakref.WeakSet[OwnBell] = weakref.WeakSet()


def own_bell() -> OwnBell:
    """The bell of this process: the same one as long as an exchange holds it."""
    with _lock:
        _own.add(bell := next(iter(_own), None) or OwnBell())
    return bell


def forget_in_child() -> None:
    """Drop the bell in a forked child, which does not have its memory; the descriptor stays open."""
    for bell in list(_own):
        bell.close.detach()
    _own.clear()


@cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


_rings = itertools.count()


def ring_value(rank: int) -> int:
    """A value that this process has not used recently, and that no process of another global `rank` uses."""
    return (next(_rings) << 12 | rank & 0xFFF) & 0xFFFFFFFF
