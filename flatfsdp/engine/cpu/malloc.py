"""Settings of glibc for host memory that is freed and allocated again in each step, as unsharded parameters on a CPU.

glibc requests each block of more than 32 MiB from the operating system, and returns it when it is freed: every page is
zeroed and mapped again at its first use. The settings affect the whole process, so importing flatfsdp does not change
them.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's numbers, from malloc.h
_BLOCK = 1 << 30
_FREE = 2**31 - 1

_retains = False


def retain_host_memory() -> bool:
    """Let this process retain the host memory that it frees, for later allocations.

    It is for training on a CPU with units of more than 32 MiB. Call it once, at the beginning of each process; it
    affects all allocations of the process, which then holds its peak memory until it ends. Blocks of more than 1 GiB
    still come from the operating system. It has the effect of the environment variable
    ``GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1073741824`` (and ``trim_threshold``); see `mallopt(3)`.

    Returns:
        Whether the C library accepted the settings: False if it is not glibc.

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
