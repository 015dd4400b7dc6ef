"""Disks that count, run full, or end the process: doubles of `flatfsdp.checkpoint.disk.Disk`."""

from __future__ import annotations

import errno
from pathlib import Path

from flatfsdp.checkpoint.disk import Disk


class Killed(BaseException):
    """Raised by `Mortal` instead of ending the process: no handler of errors may catch it."""


class Counting(Disk):
    """Records every operation, as (operation, name of the file or folder, bytes)."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, str, int]] = []

    def before(self, operation: str, path: Path, size: int) -> None:
        self.operations.append((operation, path.name, size))

    def bytes_read(self) -> int:
        return sum(size for operation, _, size in self.operations if operation == "read")


class Mortal(Counting):
    """Dies before operation number ``moment`` of those that change something, and fails from then on."""

    def __init__(self, moment: int) -> None:
        super().__init__()
        self.moment = moment

    def before(self, operation: str, path: Path, size: int) -> None:
        if operation in ("read", "open"):
            return
        if len(self.operations) >= self.moment:
            raise Killed
        super().before(operation, path, size)


class Full(Disk):
    """A disk with ``room`` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def before(self, operation: str, path: Path, size: int) -> None:
        if operation == "write":
            self.room -= size
            if self.room < 0:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
