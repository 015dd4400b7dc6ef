"""All file operations of checkpoints.

Everything that a checkpoint does to files goes through `Disk`, with one method for each kind of operation, so that
tests can count operations, end the process at any of them, or simulate a full disk. Writes name positions and are
unbuffered: bytes written before a process is killed are in the file.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ..engine.base.overrides import Override


class File:
    """An open file. `write` and `read` name positions; `close` it, or use it as a context manager."""

    def __init__(self, disk: Disk, path: Path, descriptor: int) -> None:
        self.path = path
        self._disk = disk
        self._descriptor = descriptor

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of `data` at `offset` bytes.

        Raises:
            OSError: the system reported an error.
        """
        remaining = memoryview(data).cast("B")
        while remaining:
            self._disk.before("write", self.path, len(remaining))
            done = os.pwrite(self._descriptor, remaining, offset)
            remaining, offset = remaining[done:], offset + done

    def read(self, into: memoryview, offset: int) -> int:
        """Read into `into` from `offset` on. Returned: the number of bytes read, less only at the end of the file."""
        remaining = into.cast("B")
        self._disk.before("read", self.path, len(remaining))
        while remaining:
            done = os.preadv(self._descriptor, [remaining], offset)
            if done == 0:
                break
            remaining, offset = remaining[done:], offset + done
        return len(into) - len(remaining)

    def allocate(self, size: int) -> None:
        """Give the file `size` bytes; zeros where nothing is written."""
        self._disk.before("allocate", self.path, 0)
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """Wait until written data would survive a loss of power."""
        self._disk.before("sync", self.path, 0)
        os.fsync(self._descriptor)


class Files:
    """Open files of a folder by name, each opened once; a context manager that closes them."""

    def __init__(self, folder: Path = Path(), *, write: bool = False) -> None:
        self._folder = folder
        self._write = write
        self._open: dict[str | Path, File] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *details: object) -> None:
        for file in self._open.values():
            file.__exit__(*details)

    def __getitem__(self, name: str | Path) -> File:
        if name not in self._open:
            self._open[name] = disk().open(self._folder / name, write=self._write)
        return self._open[name]

    def sync(self) -> None:
        """Wait until all of them are on the disk."""
        for file in self._open.values():
            file.sync()


class Disk:
    """The file system, as checkpoints use it. Every method raises OSError where the system reports an error."""

    def before(self, operation: str, path: Path, size: int) -> None:
        """Called before each operation below; `size` in bytes for reads and writes. Tests count or raise here."""

    def create(self, path: Path, *, exclusive: bool = False) -> File:
        """A new file to write; an existing file is truncated, or, if `exclusive`, an error."""
        self.before("create", path, 0)
        return File(
            self, path, os.open(path, os.O_CREAT | (os.O_EXCL if exclusive else os.O_TRUNC) | os.O_WRONLY, 0o666)
        )

    def open(self, path: Path, *, write: bool = False) -> File:
        """A regular file that exists, to read or to write. Another kind (a pipe, a device) is refused."""
        self.before("open", path, 0)
        _require_regular(path, os.stat(path))  # before it is opened: opening a device can have effects
        descriptor = os.open(path, (os.O_WRONLY if write else os.O_RDONLY) | os.O_NONBLOCK)  # a pipe would block
        try:
            _require_regular(path, os.fstat(descriptor))
        except OSError:
            os.close(descriptor)
            raise
        return File(self, path, descriptor)

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a new file with these contents, and sync it."""
        with self.create(path) as file:
            file.write(data, 0)
            file.sync()

    def publish(self, path: Path, data: bytes) -> None:
        """Write a new file with these contents atomically: it exists complete or not at all."""
        part = path.with_name(f"{path.name}.part")
        self.write_file(part, data)
        self.rename(part, path)

    def read_file(self, path: Path, most: int | None = None) -> bytes:
        """The contents of a file; at most the first `most` bytes."""
        with self.open(path) as file:
            size = os.stat(path).st_size
            data = bytearray(size if most is None else min(size, most))
            found = file.read(memoryview(data), 0)
        return bytes(data[:found])

    def make_folder(self, path: Path) -> None:
        """Make a folder and its parents, if they do not exist."""
        self.before("make_folder", path, 0)
        path.mkdir(parents=True, exist_ok=True)

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder would survive a loss of power."""
        self.before("sync", path, 0)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder atomically. A file or empty folder at the new name is replaced."""
        self.before("rename", old, 0)
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with its contents, if it exists."""
        if path.is_dir() and not path.is_symlink():
            for inside in sorted(path.iterdir()):
                self.remove(inside)
            self.before("remove", path, 0)
            path.rmdir()
        elif path.is_symlink() or path.exists():
            self.before("remove", path, 0)
            path.unlink(missing_ok=True)


def _require_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


_current = Override(Disk())
through = _current.being  # a context in which this process's checkpoints use another disk


def disk() -> Disk:
    """The disk in use."""
    return _current.value
