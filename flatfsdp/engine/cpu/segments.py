"""Memory that other processes map: anonymous files (`memfd_create(2)`), which are freed with their last mapping.

[Note: segments] A segment's pages are allocated at its creation, and it cannot shrink: no process that maps it can be
killed (SIGBUS) by the actions of another one. Pages that were given back read as zeros, and are allocated again before
they are written. A forked child does not inherit the mapping, and must not unmap it: the addresses may be in use for
other memory of the child.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref

import torch

_SEAL_GROW = 0x0004
_SEALS = 0x0001 | 0x0002 | _SEAL_GROW  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW of fcntl.h
_ADD_SEALS = 1033
_PAGES = 256 * 1024  # bytes for which pages are allocated at a time
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of mman.h, which Linux has from 5.14 on
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class MemorySegment:
    """A mapped segment.

    Attributes:
        bytes: the memory as a tensor, shape (size,), dtype uint8. The memory stays mapped while a view of that lives.
        memory: the memory as an `mmap` object.
        held: the number of bytes, from the beginning, that are known to have pages.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        """Map the segment of `descriptor`, which stays open."""
        self.memory = mmap.mmap(descriptor, size)
        self.memory.madvise(mmap.MADV_DONTFORK)
        _mapped.add(self.memory)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.held = size

    def give_pages_back(self, start: int) -> bool:
        """Free all pages from the byte `start` on, for all processes that map the segment. Returns False, and frees
        nothing, if the system could not allocate them again safely."""
        try:
            self.memory.madvise(_POPULATE_WRITE, start, mmap.PAGESIZE)  # checks that the system supports it
            self.memory.madvise(mmap.MADV_REMOVE, start)
        except OSError:
            return False
        self.held = start
        return True

    def take_pages(self, end: int) -> None:
        """Allocate pages at least up to the byte `end`.

        Raises:
            OSError: there is not enough memory, or the system cannot allocate pages in advance.
        """
        end = min(-(-end // _PAGES) * _PAGES, len(self.memory))
        start = self.held // mmap.PAGESIZE * mmap.PAGESIZE
        self.memory.madvise(_POPULATE_WRITE, start, end - start)
        self.held = end


def create(size: int, *, grows: bool = False) -> int:
    """A descriptor of a new segment of `size` bytes, all zero; `grows`: it may become larger.

    Raises:
        OSError: there is not enough memory, or the system has no such files.
    """
    descriptor = os.memfd_create("flatfsdp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS & ~_SEAL_GROW if grows else _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed(descriptor: int, size: int) -> bool:
    """Whether a segment of another process has that `size`, and is sealed against changes of it."""
    seals = fcntl.fcntl(descriptor, _ADD_SEALS + 1)
    return os.fstat(descriptor).st_size == size and seals & _SEALS == _SEALS


def _keep_in_child() -> None:
    for memory in _mapped:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


os.register_at_fork(after_in_child=_keep_in_child)
