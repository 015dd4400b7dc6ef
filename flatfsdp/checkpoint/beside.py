"""Small files that a program wants inside a checkpoint: written by a function of its own, listed with the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from . import manifest
from .disk import disk
from .manifest import SavedFile
from .reading import checksum, is_inside


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
