"""Memory that other processes map: files without a name (`memfd_create(2)`), which end with the last who maps them.

[Note: segments] A segment's pages are taken when it is made, and it is sealed against another size: no process that
maps it can be ended (SIGBUS) by what another does. Pages that were given back are zeros for who reads them, and are
taken again before anything is written. A child that is forked does not get the memory, and never unmaps what it has not
got: other memory of its own may lie there.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref

import torch

_SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW of fcntl.h
_ADD_SEALS = 1033
_PAGES = 256 * 1024  # bytes that get pages at once
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of mman.h, which Linux has from 5.14 on
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class MemorySegment:
    """A mapped segment.

    Attributes:
        bytes: a view of it, shape (size,), dtype uint8. As long as a view of that lives the memory is mapped.
        memory: the same for Python.
        held: so many bytes, from the first on, have pages for sure.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        """Map what `descriptor` stands for, which stays open."""
        self.memory = mmap.mmap(descriptor, size)
        self.memory.madvise(mmap.MADV_DONTFORK)
        _mapped.add(self.memory)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.held = size

    def give_pages_back(self, start: int) -> bool:
        """Give the system what lies from the byte `start` on, for all who map it; False where it could not be taken
        again safely, and stays."""
        try:
            self.memory.madvise(_POPULATE_WRITE, start, mmap.PAGESIZE)  # whether the system can
            self.memory.madvise(mmap.MADV_REMOVE, start)
        except OSError:
            return False
        self.held = start
        return True

    def take_pages(self, end: int) -> None:
        """Have pages up to the byte `end`, at least.

        Raises:
            OSError: there is not so much memory, or the system cannot show it.
        """
        end = min(-(-end // _PAGES) * _PAGES, len(self.memory))
        start = self.held // mmap.PAGESIZE * mmap.PAGESIZE
        self.memory.madvise(_POPULATE_WRITE, start, end - start)
        self.held = end


def create(size: int) -> int:
    """A descriptor of a new segment of `size` bytes, all zero.

    Raises:
        OSError: there is not so much memory, or the system has no such files.
    """
    descriptor = os.memfd_create("flatfsdp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed(descriptor: int, size: int) -> bool:
    """Whether a segment that another process made has that `size` for good."""
    seals = fcntl.fcntl(descriptor, _ADD_SEALS + 1)
    return os.fstat(descriptor).st_size == size and seals & _SEALS == _SEALS


def _keep_in_child() -> None:
    for memory in _mapped:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


os.register_at_fork(after_in_child=_keep_in_child)
