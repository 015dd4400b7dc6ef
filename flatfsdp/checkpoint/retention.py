"""Retention of the checkpoints in a folder: the last ones, and the best ones."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch.distributed as dist

from ..errors import CheckpointError, ConfigValueError, refuse_value
from .disk import disk
from .folders import CheckpointFolder, candidates, is_own, refuse_newer
from .lock import LOCK, TOKEN, locked_now, path_of_token, sweep_tokens
from .manifest import Manifest, id_in
from .ranks import CheckpointRanks


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """A retention rule for the checkpoints in a folder: the `last` ones and the `best` ones stay.

    Attributes:
        last: how many of the most recent saves stay, at least 1. Clocks and names do not matter.
        best: how many of those with the best metric `by` (see ``metrics`` of `save`) stay; those without it never do.
        by: the name of the metric; for `best`.
        mode: "min" if smaller is better, "max" if larger is.
        named: a pattern (`fnmatch`) of names; checkpoints of other names are left alone, and not counted.
        unfinished: also remove the leftovers of saves to such names that did not finish. Saves in progress are left
            alone.

    Raises:
        ConfigValueError: numbers that keep nothing, or `best` without `by`.
    """

    last: int = 1
    best: int = 0
    by: str | None = None
    mode: str = "min"
    named: str = "*"
    unfinished: bool = False

    def __post_init__(self) -> None:
        if self.last < 1:
            refuse_value("last", self.last, "at least 1: the checkpoint to go on from")
        if self.best < 0 or (self.best > 0) != (self.by is not None):
            raise ConfigValueError(
                f"best, by: got {self.best!r} and {self.by!r}. Accepted: a number above 0 and a metric's name, or none."
            )
        if self.mode not in ("min", "max"):
            refuse_value("mode", self.mode, "'min' or 'max'")

    def remove(self, folder: Path, completed: Path | None = None) -> list[Path]:
        """Remove the others in `folder`, in the order in which they were saved, and return them. Not
        collective.

        Args:
            folder: as for `keep`.
            completed: a checkpoint that a save has just completed; it always stays.
        """
        self._clear_up(folder)
        there = _saved_in(folder, self.named)
        staying = {completed, *(path for path, _ in there[-self.last :])}
        if self.by is not None:
            measured = [(path, each.metrics) for path, each in there]
            staying |= set(_best_of(measured, by=self.by, mode=self.mode)[: self.best])
        return [path for path, each in there if path not in staying and _remove(path, each.id)]

    def _clear_up(self, folder: Path) -> None:
        """Remove leftovers of killed processes: locks, tokens and, if `unfinished`, folders of unfinished saves."""
        names = []
        for left in folder.glob(".*"):
            if left.suffix == TOKEN:
                names.append(path_of_token(left).name)
            elif left.suffix == LOCK or (self.unfinished and left.suffix == ".new"):
                names.append(left.stem[1:])
        for name in sorted(set(names)):
            if name and fnmatchcase(name, self.named):
                location = CheckpointFolder(folder / name)
                with suppress(CheckpointError), locked_now(location.path) as free:  # a folder that no save made stays
                    if not free:
                        continue
                    sweep_tokens(location.path)
                    refuse_newer(location)
                    if self.unfinished and location.is_complete(location.new):
                        location.clear_up(location.new)  # complete, only not in its place: it counts as a checkpoint
                    elif self.unfinished:
                        location.discard(location.new)


def _remove(path: Path, id: str) -> bool:
    """Remove the checkpoint with this id at `path`; False during a save, or where another one is there."""
    location = CheckpointFolder(path)
    with locked_now(path) as free:
        if not free or id_in(path) != id or os.path.lexists(location.old):
            return False
        disk().rename(path, location.old)  # atomic: a partly removed checkpoint never has a checkpoint's name
        location.discard(location.old)
        return True


def _best_of(there: Sequence[tuple[Path, Mapping[str, float]]], *, by: str, mode: str) -> list[Path]:
    """The checkpoints that have the metric `by`, the best first, given all with their metrics in the order of saving.

    Of equal ones, the later comes first.
    """
    measured = [(path, metrics[by]) for path, metrics in reversed(there) if not math.isnan(metrics.get(by, math.nan))]
    measured.sort(key=lambda each: -each[1] if mode == "max" else each[1])
    return [path for path, _ in measured]


def keep(
    folder: str | os.PathLike[str],
    *,
    last: int = 1,
    best: int = 0,
    by: str | None = None,
    mode: str = "min",
    process_group: dist.ProcessGroup | None = None,
) -> list[Path]:
    """Remove the checkpoints of flatfsdp in `folder`, except for the `last` and the `best` ones. Collective.

    Args:
        folder: holds one folder for each checkpoint; other contents are left alone, symbolic links included.
        last, best, by, mode: see `Keeping`.
        process_group: the ranks that call; None for all. The first one removes.

    Returns:
        The checkpoints that have been removed, in the order in which they were saved. One that another job is replacing
        stays.

    Raises:
        ConfigValueError: numbers that keep nothing, or `best` without `by`.
        CheckpointError: on every rank: the disk reported an error.
    """
    keeping = Keeping(last=last, best=best, by=by, mode=mode)
    ranks = CheckpointRanks(process_group, "checkpoint.keep()")
    where = Path(os.path.abspath(folder))
    doing = f"removing checkpoints in {os.fspath(folder)}"
    return ranks.exchange(doing, lambda: keeping.remove(where) if ranks.rank == 0 else [])[0]


def _saved_in(folder: Path, named: str) -> list[tuple[Path, Manifest]]:
    """The checkpoints inside, the oldest first, without links. Removals that were killed are finished."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Pass the one that contains the checkpoints")
    found = []
    for inside in sorted(folder.iterdir()):
        if inside.name.startswith(".") and inside.name.endswith(".old"):
            if fnmatchcase(inside.name[1:-4], named):
                _finish_removal(CheckpointFolder(folder / inside.name[1:-4]))
        elif fnmatchcase(inside.name, named) and not inside.name.startswith(".") and not inside.is_symlink():
            there = candidates(CheckpointFolder(inside), damaged=True)
            found += [(path, manifest) for path, manifest in there if path == inside]
    return sorted(found, key=lambda each: each[1].order)


def _finish_removal(location: CheckpointFolder) -> None:
    """Finish a killed removal. An old folder alone is one's leftover: a save would have a complete new folder, too."""
    with locked_now(location.path) as free:
        if free and is_own(location.old) and not location.path.exists() and not location.is_complete(location.new):
            with suppress(CheckpointError):
                refuse_newer(location)
                location.discard(location.old)
