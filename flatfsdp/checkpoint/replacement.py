"""A new folder in the place of an old one, step by step; after each step all ranks know that all have done it.

A program's own small files may be in it: a function of its own writes them, and they are listed with the others.
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
        ranks: those that write.
        place: where.
        doing: what they do, for messages.
        lock: of the place, which the rank takes that acts on folders. [Note: lock]
        leader: the rank that acts on folders for this one; known in `run`.
    """

    leader: int

    def __init__(self, ranks: CheckpointRanks, place: CheckpointFolder, doing: str) -> None:
        self.ranks = ranks
        self.place = place
        self.doing = doing
        self.lock = Lock(place.path)

    @property
    def leads(self) -> bool:
        """Whether this rank acts on folders."""
        return self.leader == self.ranks.rank

    def all(self, work: Callable[[], T]) -> list[T]:
        """Let every rank do its `work`. Collective."""
        return self.ranks.exchange(self.doing, work)

    def lead(self, work: Callable[[], T]) -> list[T | None]:
        """Let those that lead do this. Collective."""
        return self.all(lambda: work() if self.leads else None)

    def run(self, prepare: Callable[[], object], fill: Callable[[], T], *, per_node: bool = False) -> T:
        """Let what `fill` writes into `place.new`, which `prepare` makes, take its place; what `fill` returned.
        Collective, as those are.

        Raises:
            CheckpointError: on every rank; there is what was there before.
        """
        self.leader = leader_of(self.place, self.ranks, self.doing, per_node=per_node)
        try:
            prepare()
            try:
                filled = fill()
            except CheckpointError:
                if self.leads:
                    with contextlib.suppress(OSError, CheckpointError):  # a full disk gets back what was written
                        self.lock.check()
                        self.place.discard(self.place.new)
                raise
            self.lead(self._swap)
            self.lead(lambda: self.place.discard(self.place.old))  # what was replaced
            return filled
        finally:
            self.lock.release()

    def publish(self, data: bytes) -> None:
        """Make the new folder complete, by its marker with these contents."""
        self.lock.check()
        disk().publish(self.place.new / self.place.marker, data)

    def _swap(self) -> None:
        self.lock.check()
        self.place.swap()


def written_by(write: Callable[[Path], None], folder: Path) -> list[SavedFile]:
    """Let `write` put files into `folder`; those, safe from a loss of power.

    Raises:
        CheckpointError: it raised, or wrote over what is the checkpoint's own.
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
    """Of all files inside, by name, what changes when they are written to."""
    files = {path.relative_to(folder).as_posix(): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: (each.st_ino, each.st_size, each.st_mtime_ns) for name, each in files.items()}
