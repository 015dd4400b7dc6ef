"""Memory of the host that is freed and taken again all the time, as unsharded parameters are on a CPU.

glibc takes blocks of more than 32 MiB from the operating system again each time, and gives them back each time: every
page is zeroed and mapped again at its first use. That is a setting of the whole process, so importing flatfsdp leaves
it alone.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's numbers, from malloc.h
_BLOCK = 1 << 30
_FREE = 2**31 - 1

_retains = False


def retain_host_memory() -> bool:
    """Let this process keep the host memory that it frees, for what it allocates next.

    For training on a CPU with units of more than 32 MiB. Call it once, first thing in each process; everything that the
    process allocates is affected, and what it once held at its peak it keeps. Blocks of more than 1 GiB still come from
    the operating system. It does what ``GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1073741824`` (and
    ``trim_threshold``) would do from outside; see `mallopt(3)`.

    Returns:
        Whether the C library took the settings: False where it is not glibc.

    Example:
        >>> import flatfsdp
        >>> kept = flatfsdp.retain_host_memory()
    """
    global _retains
    _retains = True
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, _FREE))


def retains_host_memory() -> bool:
    """Whether `retain_host_memory` was called."""
    return _retains
