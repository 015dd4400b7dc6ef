"""The folders of a checkpoint while it is replaced: at every moment one of them is complete.

[Note: siblings] A folder cannot be renamed onto a folder with files. A save to `path` therefore writes to the sibling
`.<name>.new`, whose manifest comes last; then `path` becomes `.<name>.old`, `.<name>.new` becomes `path`, and the old
folder is removed. At whatever moment a process is killed, one of the three is complete: `candidates` lists them, the
newest first, and the next save cleans up. An incomplete folder holds `flatfsdp.json.part` from its first moment to its
last; folders of such names without that file, and links, were not left by a save, and stay. Ranks without a shared
file system do these steps at the same time, so that one save is complete on all of them at every moment.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, ranks_in_words, refuse_value
from . import manifest, metadata
from .disk import disk
from .lock import drop_token, leave_token, sweep_tokens
from .manifest import Manifest, NewerFormatError
from .ranks import CheckpointRanks
from .reading import is_inside
from .tensor_file import CHECKSUMS, SUFFIX

# Seconds after which a file written by another rank counts as invisible: network file systems are slow.
PATIENCE = 5.0
PART = ".part"
# The names of files that saves and exports write.
OWN = re.compile(rf"__\d+_\d+\.distcp|[^/]*{re.escape(SUFFIX)}(\.(index|checksums)\.json)?")
_MARKS = frozenset(f"{name}{part}" for name in (manifest.NAME, CHECKSUMS) for part in ("", PART))


@dataclass(frozen=True)
class CheckpointFolder:
    """The three folders of [Note: siblings].

    Attributes:
        path: the folder that users name.
        marker: the file that is written last.
    """

    path: Path
    marker: str = manifest.NAME

    @classmethod
    def at(cls, path: str | os.PathLike[str], marker: str = manifest.NAME) -> CheckpointFolder:
        """From a path given by users. Links are resolved, because a link must stay a link."""
        real = Path(os.path.realpath(path))
        if not real.name:
            refuse_value("path", os.fspath(path), "a folder inside another one")
        return cls(real, marker)

    @property
    def new(self) -> Path:
        """The folder that a save writes to."""
        return self.path.with_name(f".{self.path.name}.new")

    @property
    def old(self) -> Path:
        """The replaced checkpoint, during the swap."""
        return self.path.with_name(f".{self.path.name}.old")

    def is_complete(self, folder: Path) -> bool:
        """Whether a save to `folder` has completed."""
        return (folder / self.marker).is_file()

    def complete(self) -> list[Path]:
        """The folders that are complete, the newest first: only one, except during a swap or after a killed one."""
        return [folder for folder in (self.new, self.path, self.old) if self.is_complete(folder)]

    def prepare(self, keep: Path | None, *, overwrite: bool) -> None:
        """Clean up after a killed save, so that `keep` is at `path`, and make the folder to write to.

        Raises:
            CheckpointError: there is a complete checkpoint and `overwrite` is False, or there are other files, or a
                checkpoint of a newer flatfsdp.
        """
        refuse_newer(CheckpointFolder(self.path))
        self.clear_up(keep)
        self._check_free(overwrite=overwrite)
        disk().make_folder(self.new)
        disk().write_file(self._part(self.new), b"")

    def clear_up(self, keep: Path | None) -> None:
        """Clean up after a killed save: move `keep`, one of the three folders, to `path`, and remove the others.

        Raises:
            CheckpointError: a folder to remove was not made by a save; nothing has been done then.
        """
        for folder in (self.new, self.old, *([self.path] if keep in (self.new, self.old) else [])):
            self._require_own(folder)
        if keep == self.old:
            if self.path.exists():  # incomplete, or not complete on all ranks
                self.discard(self.new)
                disk().rename(self.path, self.new)
            disk().rename(self.old, self.path)
        elif keep == self.new:
            if self.path.exists():
                self.discard(self.old)
            self.swap()
        self.discard(self.old)
        self.discard(self.new)
        sweep_tokens(self.path)

    def _check_free(self, *, overwrite: bool) -> None:
        if not self.path.exists():
            return
        found = {
            each.relative_to(self.path).as_posix()
            for each in self.path.rglob("*")
            if each.is_symlink() or not each.is_dir() or not any(each.iterdir())
        }
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
            here = dict(candidates(CheckpointFolder(self.path), damaged=True)).get(self.path)
            known = {*self._beside(), *(file.name for file in (here.files if here else ()))}
            found = {name for name in found if name.partition("/")[0] not in known and name not in known}
            found = {name for name in found if not OWN.fullmatch(name)} - {self.marker, metadata.NAME}
        if found:
            raise CheckpointError(
                f"{self.path} holds {len(found)} files that were not written by a save "
                f"({', '.join(sorted(found)[:3])}); saving would remove them. Save to another folder"
            )

    def _beside(self) -> list[str]:
        """The small files that an export wrote along with its weights."""
        if self.marker == manifest.NAME or not self.is_complete(self.path):
            return []
        try:
            return list(json.loads(disk().read_file(self.path / self.marker)).get("beside", []))
        except ValueError:  # damaged
            return []

    def swap(self) -> None:
        """Replace the old folder with the new, complete one."""
        disk().sync_folder(self.new)
        if self.path.exists():
            disk().rename(self.path, self.old)
        disk().rename(self.new, self.path)
        disk().sync_folder(self.path.parent)

    def discard(self, folder: Path) -> None:
        """Remove one of the three folders.

        Raises:
            CheckpointError: it was not made by a save, or is a link.
        """
        if not os.path.lexists(folder):
            return
        self._require_own(folder)
        mark = self._part(folder)
        if self.is_complete(folder):
            disk().rename(folder / self.marker, mark)  # first, so that a partly removed folder never looks complete
        for inside in sorted(folder.iterdir()):
            if inside != mark:
                disk().remove(inside)
        disk().remove(mark)
        disk().remove(folder)

    def _require_own(self, folder: Path) -> None:
        if os.path.lexists(folder) and not is_own(folder):
            raise CheckpointError(f"{folder} lies where saves to {self.path} write, but no save made it. Move it away")

    def _part(self, folder: Path) -> Path:
        return folder / f"{self.marker}{PART}"


def is_own(folder: Path) -> bool:
    """Whether a save or an export made a folder, complete or not. False for links and for folders of DCP."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = {each.name for each in folder.iterdir()}
    return not names or bool(names & _MARKS)  # a killed save or removal may leave an empty folder


def refuse_link(path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuse to replace the target of a symbolic link: the target may still be wanted.

    Raises:
        CheckpointError: `path` is a link, and `overwrite` is True.
    """
    link = os.path.abspath(path)
    if overwrite and os.path.islink(link):
        raise CheckpointError(
            f"{link} is a symbolic link to {os.path.realpath(link)}; a save with overwrite=True replaces a folder, "
            "never the target of a link. Save to a path that is not a link"
        )


def last_sequence(folder: Path) -> int:
    """The largest sequence ([Note: order]) of all saves in `folder`, complete or not; 0 without any."""
    return max((manifest.sequence_in(inside) for inside in folder.iterdir() if not inside.is_symlink()), default=0)


def manifests(location: CheckpointFolder) -> list[tuple[Path, Manifest | CheckpointError]]:
    """The manifest of each complete folder at a location, or the error that reading it raised."""
    found: list[tuple[Path, Manifest | CheckpointError]] = []
    for folder in location.complete():
        where = folder / manifest.NAME
        try:
            if not is_inside(where, os.path.realpath(folder)):
                raise CheckpointError(f"{where} is a link out of the folder")
            found.append((folder, Manifest.from_bytes(disk().read_file(where), str(where))))
        except CheckpointError as error:
            found.append((folder, error))
        except OSError as error:
            found.append((folder, CheckpointError(f"{where} cannot be read: {error}")))
    return found


def candidates(location: CheckpointFolder, *, damaged: bool = False) -> list[tuple[Path, Manifest]]:
    """The complete checkpoints of flatfsdp at a location, the newest first.

    Raises:
        CheckpointError: a manifest is damaged; with `damaged` it is left out instead.
    """
    found = []
    for folder, read in manifests(location):
        if isinstance(read, Manifest):
            found.append((folder, read))
        elif not damaged:
            raise read
    return sorted(found, key=lambda each: each[1].order, reverse=True)


def refuse_newer(location: CheckpointFolder) -> None:
    """Require that there is no checkpoint of a newer flatfsdp at a location: this version must not replace it.

    Raises:
        CheckpointError: there is one.
    """
    for _, read in manifests(location):
        if isinstance(read, NewerFormatError):
            raise CheckpointError(f"{read}, and this version does not replace it. Save to another folder")


def choose(seen: Sequence[Sequence[str]], path: Path) -> str:
    """The newest save that every rank sees, given for each rank the ids that it sees, the newest first.

    Raises:
        CheckpointError: there is none.
    """
    for id in dict.fromkeys(id for ids in seen for id in ids):
        if all(id in ids for ids in seen):
            return id
    blind = [rank for rank, ids in enumerate(seen) if not ids]
    if len(blind) == len(seen):
        raise CheckpointError(f"{path}: no complete checkpoint there. Pass the path that was saved to")
    if blind:
        raise CheckpointError(
            f"{path}: {ranks_in_words(blind)} of {len(seen)} do not see a complete checkpoint there, others do; "
            "use a path that all ranks share, or copy the folder to every node"
        )
    raise CheckpointError(f"{path}: ranks see checkpoints of different saves there; copy one of them to every node")


def leader_of(location: CheckpointFolder, ranks: CheckpointRanks, doing: str, *, per_node: bool) -> int:
    """The rank that acts on folders for this one, found by a file that it writes next to them. Collective.

    Raises:
        CheckpointError: on every rank, naming those that do not see the files of rank 0 (without `per_node`).
    """
    writes = per_node or ranks.rank == 0
    with ExitStack() as undo:

        def leave() -> str:
            token = leave_token(location.path)
            undo.callback(drop_token, token)
            return token.name

        tokens = ranks.exchange(doing, lambda: leave() if writes else "")
        if per_node:
            names = ranks.together(doing, lambda: {each.name for each in location.path.parent.iterdir()})
            return next(rank for rank, token in enumerate(tokens) if token in names)
        seen = ranks.exchange(doing, lambda: _sees(location.path.with_name(tokens[0])))
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise CheckpointError(
            f"{doing}: {ranks_in_words(blind)} of {ranks.world} do not see the files of rank 0 in "
            f"{location.path.parent}. Save to a folder that all ranks share, or pass per_node=True: then every node "
            "keeps a folder with the state of its own ranks"
        )
    return 0


def _sees(token: Path) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not token.exists():
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):  # listing refreshes the cache of some network file systems
            os.scandir(token.parent).close()
        time.sleep(0.05)
    return True
