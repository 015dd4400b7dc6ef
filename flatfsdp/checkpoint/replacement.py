"""Replacing a folder with a new one, in steps; after each step, all ranks know that all have done it.

It may contain small files of the user's program, written by a user-defined function and listed with the others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import CheckpointError
from . import manifest
from .disk import disk
from .folders import CheckpointFolder, leader_of
from .lock import Lock
from .manifest import SavedFile
from .ranks import CheckpointRanks
from .reading import checksum, is_inside

T = TypeVar("T")


class Replacement:
    """One save or export. [Note: siblings]

    Attributes:
        ranks: the ranks that write.
        location: the folders.
        doing: a description of the operation, for messages.
        lock: the lock of the location, which the rank that acts on folders takes. [Note: lock]
        leader: the rank that acts on folders for this one; known in `run`.
    """

    leader: int

    def __init__(self, ranks: CheckpointRanks, location: CheckpointFolder, doing: str) -> None:
        self.ranks = ranks
        self.location = location
        self.doing = doing
        self.lock = Lock(location.path)

    @property
    def leads(self) -> bool:
        """Whether this rank acts on folders."""
        return self.leader == self.ranks.rank

    def all(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank. Collective."""
        return self.ranks.exchange(self.doing, work)

    def lead(self, work: Callable[[], T]) -> list[T | None]:
        """Run `work` on the ranks that lead. Collective."""
        return self.all(lambda: work() if self.leads else None)

    def run(self, prepare: Callable[[], object], fill: Callable[[], T], *, per_node: bool = False) -> T:
        """Replace the folder with `location.new`, which `prepare` makes and `fill` writes. Returned: the result of
        `fill`. Collective, as both are.

        Raises:
            CheckpointError: on every rank; the old folder is still in place.
        """
        self.leader = leader_of(self.location, self.ranks, self.doing, per_node=per_node)
        try:
            prepare()
            try:
                filled = fill()
            except CheckpointError:
                if self.leads:
                    with contextlib.suppress(OSError, CheckpointError):  # frees space on a full disk
                        self.lock.check()
                        self.location.discard(self.location.new)
                raise
            self.lead(self._swap)
            self.lead(lambda: self.location.discard(self.location.old))  # the replaced folder
            return filled
        finally:
            self.lock.release()

    def publish(self, data: bytes) -> None:
        """Make the new folder complete, by its marker with these contents."""
        self.lock.check()
        disk().publish(self.location.new / self.location.marker, data)

    def _swap(self) -> None:
        self.lock.check()
        self.location.swap()


def written_by(write: Callable[[Path], None], folder: Path) -> list[SavedFile]:
    """Call `write` to put files into `folder`. Returned: these files, synced to the disk.

    Raises:
        CheckpointError: it raised, or wrote over files of the checkpoint.
    """
    before = _stamps(folder)
    try:
        write(folder)
    except Exception as error:
        raise CheckpointError(f"the function given as files= raised {type(error).__name__}: {error}") from error
    after = _stamps(folder)
    own = [name for name, stamp in before.items() if after.get(name) != stamp]
    own += [name for name in after if name == manifest.NAME]
    if own:
        raise CheckpointError(f"the function given as files= wrote or removed {', '.join(own)}: the checkpoint's own")
    saved = []
    for name in sorted(after.keys() - before.keys()):
        path = folder / name
        if not is_inside(path, os.path.realpath(folder)):
            raise CheckpointError(f"the function given as files= made {name} a link out of the folder; write a copy")
        with disk().open(path, write=True) as file:
            file.sync()
        size = path.stat().st_size
        saved.append(SavedFile(name, size, checksum(path, 0, size)))
    for inner in {(folder / each.name).parent for each in saved} - {folder}:
        disk().sync_folder(inner)
    return saved


def _stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
    """By name, for all files inside, the metadata that changes when they are written to."""
    files = {path.relative_to(folder).as_posix(): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: (each.st_ino, each.st_size, each.st_mtime_ns) for name, each in files.items()}
