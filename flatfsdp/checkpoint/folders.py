"""Where a checkpoint lies while it is being replaced, so that a complete one is there at every moment.

[Note: siblings] A folder cannot be renamed onto one that has files. A save to `path` therefore writes beside it, into
`.<name>.new`, whose manifest comes last; then `path` becomes `.<name>.old`, `.<name>.new` becomes `path`, and the old
one goes. Whatever moment a process is killed at, one of the three is complete: `candidates` lists them, the newest
first, and the next save clears up. Ranks without a shared file system do these steps at the same time, so that one save
is complete on all of them at every moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, ranks_in_words, refuse_value
from . import manifest, metadata
from .disk import disk
from .manifest import Manifest
from .ranks import Ranks

__all__ = ["Place", "candidates", "choose"]

# Seconds after which a file that another rank has written is not seen any more: network file systems are slow to tell.
PATIENCE = 5.0
TOKEN = ".token"


@dataclass(frozen=True)
class Place:
    """The three folders of [Note: siblings].

    Attributes:
        path: the one that users know.
        marker: the file that is written last.
    """

    path: Path
    marker: str = manifest.NAME

    @classmethod
    def at(cls, path: str | os.PathLike[str], marker: str = manifest.NAME) -> Place:
        """Of a path as users give it; where links lead, because a link itself must stay one."""
        real = Path(os.path.realpath(path))
        if not real.name:
            refuse_value("path", os.fspath(path), "a folder inside another one")
        return cls(real, marker)

    @property
    def new(self) -> Path:
        """Where a save writes."""
        return self.path.with_name(f".{self.path.name}.new")

    @property
    def old(self) -> Path:
        """What a save replaces, for a moment."""
        return self.path.with_name(f".{self.path.name}.old")

    def is_complete(self, folder: Path) -> bool:
        """Whether a save to `folder` came to its end."""
        return (folder / self.marker).is_file()

    def complete(self) -> list[Path]:
        """The folders that are complete, the newest first: one, but while a save swaps them or after it was killed."""
        return [folder for folder in (self.new, self.path, self.old) if self.is_complete(folder)]

    def prepare(self, keep: Path | None, *, overwrite: bool) -> None:
        """Clear up what a killed save left, so that `keep` is at `path`, and make the folder to write to.

        Raises:
            CheckpointError: there is something complete and `overwrite` is False, or there are other files.
        """
        self.settle(keep)
        self._check_free(overwrite=overwrite)
        disk().make_folder(self.new)

    def settle(self, keep: Path | None) -> None:
        """Clear up what a killed save left, so that `keep`, one of the three, is at `path`, and the others are gone."""
        if keep == self.old:
            if self.path.exists():  # incomplete, or of a save that did not get everywhere
                self.discard(self.new)
                disk().rename(self.path, self.new)
            disk().rename(self.old, self.path)
        elif keep == self.new:
            if self.path.exists():
                self.discard(self.old)
            self.swap()
        self.discard(self.old)
        self.discard(self.new)
        for left in self.path.parent.iterdir():
            if left.name.startswith(f".{self.path.name}.") and left.name.endswith(TOKEN):
                disk().remove(left)

    def _check_free(self, *, overwrite: bool) -> None:
        if not self.path.exists():
            return
        found = {each.name for each in self.path.iterdir()}
        if self.marker != manifest.NAME and manifest.NAME in found:
            raise CheckpointError(
                f"{self.path} is a checkpoint, which holds more than weights. Export to another folder"
            )
        if self.marker in found or metadata.NAME in found:
            if not overwrite:
                raise CheckpointError(
                    f"{self.path} is complete already. Save to another folder, or pass overwrite=True: then the old "
                    "one stays until the new one is complete"
                )
            listed = [each.files for folder, each in candidates(Place(self.path), damaged=True) if folder == self.path]
            found -= {
                self.marker,
                metadata.NAME,
                *self._beside(),
                *(file.name.partition("/")[0] for files in listed for file in files),
            }
            found = {
                name for name in found if not name.endswith((".distcp", ".safetensors", ".safetensors.index.json"))
            }
        if found:
            raise CheckpointError(
                f"{self.path} holds {len(found)} files that no save wrote ({', '.join(sorted(found)[:3])}); saving "
                "would remove them. Save to another folder"
            )

    def _beside(self) -> list[str]:
        """The small files that an export has put beside its weights."""
        if self.marker == manifest.NAME or not self.is_complete(self.path):
            return []
        try:
            return list(json.loads(disk().read_file(self.path / self.marker)).get("beside", []))
        except ValueError:  # damaged
            return []

    def swap(self) -> None:
        """Let the new one, complete by now, take the old one's place."""
        disk().sync_folder(self.new)
        if self.path.exists():
            disk().rename(self.path, self.old)
        disk().rename(self.new, self.path)
        disk().sync_folder(self.path.parent)

    def drop_old(self) -> None:
        """Remove what was replaced."""
        self.discard(self.old)

    def discard(self, folder: Path) -> None:
        """Remove a folder of these three."""
        disk().remove(folder / self.marker)  # first, so that half a folder never looks complete
        disk().remove(folder)


def candidates(place: Place, *, damaged: bool = False) -> list[tuple[Path, Manifest]]:
    """The complete checkpoints of ours at a place, the newest first.

    Raises:
        CheckpointError: a manifest is damaged; with `damaged` it is left out instead.
    """
    found = []
    for folder in place.complete():
        where = folder / manifest.NAME
        try:
            found.append((folder, Manifest.from_bytes(disk().read_file(where), str(where))))
        except CheckpointError:
            if not damaged:
                raise
    return sorted(found, key=lambda each: -each[1].saved)


def choose(seen: Sequence[Sequence[str]], path: Path) -> str:
    """The first of the saves that every rank sees, given the ids that each sees, the newest first.

    Raises:
        CheckpointError: there is none.
    """
    for id in dict.fromkeys(id for ids in seen for id in ids):
        if all(id in ids for ids in seen):
            return id
    blind = [rank for rank, ids in enumerate(seen) if not ids]
    if len(blind) == len(seen):
        raise CheckpointError(f"{path}: no complete checkpoint there")
    if blind:
        raise CheckpointError(
            f"{path}: {ranks_in_words(blind)} of {len(seen)} see no complete checkpoint there, others do; give a path "
            "that all ranks share, or copy the folder to every node"
        )
    raise CheckpointError(f"{path}: ranks see checkpoints of different saves there; copy one of them to every node")


def leader_of(place: Place, ranks: Ranks, doing: str, *, per_node: bool) -> int:
    """The rank that acts for this one on folders, found by a file that it leaves beside them. Collective.

    Raises:
        CheckpointError: on every rank, naming those that do not see what rank 0 writes (without `per_node`).
    """
    writes = per_node or ranks.rank == 0

    def leave() -> str:
        disk().make_folder(place.path.parent)
        token = place.path.with_name(f".{place.path.name}.{os.getpid()}-{time.time_ns()}{TOKEN}")
        disk().write_file(token, b"")
        return token.name

    tokens = ranks.exchange(doing, lambda: leave() if writes else "")
    try:
        if per_node:
            there = ranks.exchange(doing, lambda: _those_seen(place, tokens))
            return there[ranks.rank][0]
        seen = ranks.exchange(doing, lambda: _sees(place.path.with_name(tokens[0])))
    finally:
        if writes:
            with contextlib.suppress(OSError):
                disk().remove(place.path.with_name(tokens[ranks.rank]))
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise CheckpointError(
            f"{doing}: {ranks_in_words(blind)} of {ranks.world} do not see what rank 0 writes into "
            f"{place.path.parent}. Save to a folder that all ranks share, or pass per_node=True: then every node keeps "
            "a folder with what its own ranks hold"
        )
    return 0


def _sees(token: Path) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not token.exists():
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):  # looking makes some network file systems look again
            os.scandir(token.parent).close()
        time.sleep(0.05)
    return True


def _those_seen(place: Place, tokens: Sequence[str]) -> list[int]:
    names = {each.name for each in place.path.parent.iterdir()}
    return [rank for rank, token in enumerate(tokens) if token in names]
