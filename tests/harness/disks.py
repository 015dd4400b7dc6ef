"""Disks that count, run full, or end the process: doubles of `flatfsdp.checkpoint.disk.Disk`."""

from __future__ import annotations

import errno
from pathlib import Path

from flatfsdp.checkpoint.disk import Disk


class Killed(BaseException):
    """What `Mortal` raises in place of ending the process: no handler of errors may see it."""


class Counting(Disk):
    """Notes every operation, as (operation, name of the file or folder, bytes)."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, str, int]] = []

    def before(self, operation: str, path: Path, size: int) -> None:
        self.operations.append((operation, path.name, size))

    def bytes_read(self) -> int:
        return sum(size for operation, _, size in self.operations if operation == "read")


class Mortal(Counting):
    """Dies ahead of operation number ``moment`` that changes something, and is dead from then on."""

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
    """Has room for ``room`` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def before(self, operation: str, path: Path, size: int) -> None:
        if operation == "write":
            self.room -= size
            if self.room < 0:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
