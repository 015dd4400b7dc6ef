"""Bytes of live tensors on the CPU, of all threads: a small C library that counts, built once and preloaded."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

_BLOCK = 64 * 1024  # bytes
SOURCE = Path(__file__).with_name("malloc_counter.c")


def build() -> Path | None:
    """The counter as a shared library; None where there is no C compiler. Raises `CalledProcessError` if that fails."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = Path(tempfile.gettempdir()) / f"flatfsdp-malloc-counter-{os.getuid()}-{SOURCE.stat().st_mtime_ns}.so"
    if not library.exists():
        fresh = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", fresh, SOURCE, "-lpthread"], check=True)
        fresh.rename(library)  # atomic: another benchmark may use it
    return library


def preload() -> bool:
    """Preload the counter into every process that starts from now on. False where it cannot be built."""
    library = build()
    if library is not None:
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
    return library is not None


def return_at_once() -> None:
    """Let processes that start from now on return the memory of freed tensors at once: otherwise the freed blocks that
    glibc keeps, in no fixed order, would be most of the difference between two runs."""
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(_BLOCK), "MALLOC_TRIM_THRESHOLD_": str(_BLOCK)}


class Counter:
    """The counter of this process, counting from its construction on. Figures are None without the library."""

    def __init__(self) -> None:
        process: Any = ctypes.CDLL(None)
        self._library = process if hasattr(process, "counter_start") else None
        if self._library is not None:
            self._library.counter_live.restype = self._library.counter_peak.restype = ctypes.c_long
            self._library.counter_start()

    def live(self) -> int | None:
        """The live bytes now."""
        return None if self._library is None else self._library.counter_live()

    def peak(self) -> int | None:
        """The largest number of live bytes since the last call."""
        return None if self._library is None else self._library.counter_peak()
