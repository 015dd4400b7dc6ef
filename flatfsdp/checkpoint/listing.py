"""The checkpoints in a folder, and which of them are complete: the same answer on all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch.distributed as dist

from ..errors import CheckpointError, few, ranks_in_words
from .folders import CheckpointFolder, candidates, is_own, manifests
from .loading import is_foreign
from .ranks import CheckpointRanks
from .reading import verify
from .validation import prove


@dataclass(frozen=True)
class Listed:
    """A checkpoint in a folder.

    Attributes:
        path: its folder, to be passed to `load`.
        id: identifies the save.
        saved: the time of the save, in seconds since 1970; 0 if it cannot be read.
        sequence: orders the saves: each save's is one more than the largest in the folder. 0 if it cannot be read.
        world: how many ranks saved it; 0 if it cannot be read.
        metrics: those given to `save`.
        problem: what is wrong with it; empty if all its files are present with the sizes that were written. Only
            `load` compares checksums.
        unfinished: whether it is left over from a save that did not finish.
    """

    path: Path
    id: str = ""
    saved: float = 0.0
    world: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    unfinished: bool = False
    sequence: int = 0


def listing(
    folder: str | os.PathLike[str], *, named: str = "*", process_group: dist.ProcessGroup | None = None
) -> list[Listed]:
    """The checkpoints of flatfsdp in `folder`, and the leftovers of saves that did not finish. Collective.

    Args:
        folder: holds one folder for each checkpoint; need not exist.
        named: a pattern (`fnmatch`) of names; others are left out.
        process_group: the ranks that call; None for all. Each rank lists the folder; nodes need not share it.

    Returns:
        The same list on all ranks, except for the folder if they pass different ones; in the order of saving, after
        unreadable ones, which are sorted by name. Links to other checkpoints of the folder are left out.

    Raises:
        CheckpointError: on every rank: a rank cannot list the folder.
    """
    ranks = CheckpointRanks(process_group, "checkpoint.listing()")
    where = Path(os.path.abspath(folder))
    seen = ranks.exchange(f"looking for checkpoints in {where}", lambda: _seen_in(where, named))
    names = dict.fromkeys(name for mine in seen for name in mine)
    listed = [_united(where / name, [mine.get(name) for mine in seen]) for name in names]

    def order(each: Listed) -> tuple[object, ...]:
        return bool(each.id), each.sequence, each.saved, each.path.name

    return sorted(listed, key=order)


def _seen_in(folder: Path, named: str) -> dict[str, tuple[Listed, list[str]]]:
    """The checkpoints that this rank sees, by name, each with the names of its missing files."""
    if not folder.is_dir():
        return {}
    found = {}
    for inside in sorted(folder.iterdir()):
        hidden = inside.name.startswith(".") and inside.suffix in (".new", ".old")
        name = inside.name[1:-4] if hidden else inside.name
        if name in found or not fnmatchcase(name, named):
            continue
        try:
            if _is_save(inside, hidden, named):
                found[name] = _look(CheckpointFolder(folder / name))
        except OSError as error:  # the other folders may still be readable
            found[name] = Listed(folder / name, problem=f"it cannot be read: {error}"), []
    return found


def _is_save(inside: Path, hidden: bool, named: str) -> bool:
    if not inside.is_dir() or (hidden and not is_own(inside)):
        return False
    real = Path(os.path.realpath(inside))
    if inside.is_symlink() and real.parent == Path(os.path.realpath(inside.parent)) and fnmatchcase(real.name, named):
        return False  # a link to another checkpoint of the folder
    return (
        hidden
        or CheckpointFolder(inside).is_complete(inside)
        or any(name.endswith(".distcp") for name in os.listdir(inside))
    )


def _look(location: CheckpointFolder) -> tuple[Listed, list[str]]:
    there = candidates(location, damaged=True)
    if not there:
        for _, error in manifests(location):
            return Listed(location.path, problem=str(error)), []
        if is_foreign(location.path):
            problem = f"it has lost its {location.marker}, or torch.distributed.checkpoint saved it"
            return Listed(location.path, problem=problem), []
        problem = f"it has no {location.marker}: its save did not finish"
        return Listed(location.path, problem=problem, unfinished=True), []
    folder, manifest = there[0]
    here = [file for file in manifest.files if os.path.lexists(folder / file.name)]
    try:
        prove(manifest, str(folder / location.marker))
        verify(folder, here, contents=False)
        problem = ""
    except CheckpointError as error:
        problem = str(error)
    known = location.path, manifest.id, manifest.saved, manifest.world, manifest.metrics, problem
    return Listed(*known, sequence=manifest.sequence), [file.name for file in manifest.files if file not in here]


def _united(path: Path, seen: Sequence[tuple[Listed, list[str]] | None]) -> Listed:
    """The combined view of all ranks: a file that any node has is present."""
    blind = [rank for rank, each in enumerate(seen) if each is None]
    if blind:
        return Listed(path, problem=f"{ranks_in_words(blind)} of {len(seen)} do not see it")
    listed = [each[0] for each in seen if each is not None]
    for each in listed:
        if each.problem:
            return replace(each, path=path)
    if len({each.id for each in listed}) > 1:
        return Listed(path, problem="ranks see different saves there")
    nowhere = set.intersection(*(set(each[1]) for each in seen if each is not None))
    problem = f"{few(sorted(nowhere))} {'are' if len(nowhere) > 1 else 'is'} missing" if nowhere else ""
    return replace(listed[0], path=path, problem=problem)
