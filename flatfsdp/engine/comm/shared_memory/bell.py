"""How a rank sleeps until a peer has done something, and is woken.

[Note: bell] Every process has one word that its peers change, and on which it sleeps (`futex(2)`), whatever it waits
for. The word never has a value twice, so that a change between a look at the counters and the sleep is seen by the
kernel. Who changes it makes the system call only where somebody sleeps.

[Note: barriers] Data are written before the counter that publishes them, and on x86 stores are seen in the order in
which they were made, by readers that read in that order. What x86 may reorder is a store and a later load: "I have
posted" and "does my peer sleep?" here, "I sleep" and "what has my peer posted?" there. Between the two stands
`_barrier`, a lock that is taken and let go, which is a locked instruction. Other processors need more, and are left to
gloo.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from functools import cache

from .segments import MemorySegment, create

SIZE = 4096
_WORD, _SLEEPS = 0, 16  # indices of 32-bit words, in lines of their own
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
    """The word of one process, mapped."""

    def __init__(self, segment: MemorySegment) -> None:
        self._segment = segment
        self._words = memoryview(segment.memory).cast("I")
        self._address = ctypes.c_void_p(segment.bytes.data_ptr() + 4 * _WORD)

    def ring(self, value: int) -> None:
        """Wake its owner, if that sleeps; no two rings of a bell have the same 32-bit `value`."""
        words = self._words
        words[_WORD] = value
        _barrier()
        if words[_SLEEPS]:
            _system().syscall(_FUTEX, self._address, _WAKE, _EVERYBODY, None, None, 0)


class OwnBell(Bell):
    """This process's.

    Attributes:
        descriptor: of its segment, for peers.
    """

    def __init__(self) -> None:
        self.descriptor = create(SIZE)
        self._sleepers = 0  # threads
        super().__init__(MemorySegment(self.descriptor, SIZE))

    def look(self) -> int:
        """The word now. From here on, peers wake whoever sleeps; look at what is awaited after it."""
        with _lock:
            self._sleepers += 1
            self._words[_SLEEPS] = self._sleepers
        _barrier()
        return self._words[_WORD]

    def sleep(self, seen: int, seconds: float) -> None:
        """Sleep until a peer rings, if none has since `seen`, at most so many `seconds`."""
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        _system().syscall(_FUTEX, self._address, _WAIT, ctypes.c_uint(seen), ctypes.byref(limit), None, 0)

    def wake(self) -> None:
        """This thread sleeps no more; once for each `look`."""
        with _lock:
            self._sleepers -= 1
            self._words[_SLEEPS] = self._sleepers


@cache
def own_bell() -> OwnBell:
    """The bell of this process."""
    return OwnBell()


@cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


_rings = itertools.count()


def ring_value(rank: int) -> int:
    """One that no ring of this process had, nor one of another global `rank`, for as long as it matters."""
    return (next(_rings) << 12 | rank & 0xFFF) & 0xFFFFFFFF
