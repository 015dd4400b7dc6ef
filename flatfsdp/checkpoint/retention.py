"""Which checkpoints of a folder stay: the last ones, and the best ones."""

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
    """Which checkpoints of a folder stay: the `last` ones, and the `best` ones.

    Attributes:
        last: how many of those saved last stay, at least 1. Clocks and names do not count.
        best: how many of those stay whose metric `by` (see ``metrics`` of `save`) is best; those without it are none.
        by: the name of the metric; for `best`.
        mode: "min" if smaller is better, "max" if larger is.
        named: a pattern (`fnmatch`) of names; checkpoints of other names are left alone, and not counted.
        unfinished: remove what saves to such names have left that did not end, too. Those that are under way are left
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
        """Remove the others in `folder`, in the order in which they were saved; those that have been removed. Not
        collective.

        Args:
            folder: as for `keep`.
            completed: a checkpoint that stays in any case, for a save has just completed it.
        """
        self._clear_up(folder)
        there = _saved_in(folder, self.named)
        staying = {completed, *(path for path, _ in there[-self.last :])}
        if self.by is not None:
            measured = [(path, each.metrics) for path, each in there]
            staying |= set(_best_of(measured, by=self.by, mode=self.mode)[: self.best])
        return [path for path, each in there if path not in staying and _remove(path, each.id)]

    def _clear_up(self, folder: Path) -> None:
        """Remove what was left by processes that were killed: locks, tokens, and what `unfinished` names."""
        names = []
        for left in folder.glob(".*"):
            if left.suffix == TOKEN:
                names.append(path_of_token(left).name)
            elif left.suffix == LOCK or (self.unfinished and left.suffix == ".new"):
                names.append(left.stem[1:])
        for name in sorted(set(names)):
            if name and fnmatchcase(name, self.named):
                place = CheckpointFolder(folder / name)
                with suppress(CheckpointError), locked_now(place.path) as free:  # another folder in its place stays
                    if not free:
                        continue
                    sweep_tokens(place.path)
                    refuse_newer(place)
                    if self.unfinished and place.is_complete(place.new):
                        place.clear_up(place.new)  # all but in its place: one of those to choose from
                    elif self.unfinished:
                        place.discard(place.new)


def _remove(path: Path, id: str) -> bool:
    """Remove the checkpoint of this id from `path`; False where a save is under way there, or another one is there."""
    place = CheckpointFolder(path)
    with locked_now(path) as free:
        if not free or id_in(path) != id or os.path.lexists(place.old):
            return False
        disk().rename(path, place.old)  # at once: half a checkpoint never has a checkpoint's name
        place.discard(place.old)
        return True


def _best_of(there: Sequence[tuple[Path, Mapping[str, float]]], *, by: str, mode: str) -> list[Path]:
    """The checkpoints that have the metric `by`, the best first, given all with their metrics in the order of saving.

    Of equal ones the later comes first.
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
    """Remove checkpoints of flatfsdp's in `folder`, but the `last` ones and the `best` ones. Collective.

    Args:
        folder: holds one folder for each checkpoint; whatever else it holds is left alone, symbolic links included.
        last, best, by, mode: see `Keeping`.
        process_group: the ranks that call; None for all. The first one removes.

    Returns:
        The checkpoints that have been removed, in the order in which they were saved. One that another job replaces at
        this moment stays.

    Raises:
        ConfigValueError: numbers that keep nothing, or `best` without `by`.
        CheckpointError: on every rank: the disk refused.
    """
    keeping = Keeping(last=last, best=best, by=by, mode=mode)
    ranks = CheckpointRanks(process_group, "checkpoint.keep()")
    where = Path(os.path.abspath(folder))
    doing = f"removing checkpoints in {os.fspath(folder)}"
    return ranks.exchange(doing, lambda: keeping.remove(where) if ranks.rank == 0 else [])[0]


def _saved_in(folder: Path, named: str) -> list[tuple[Path, Manifest]]:
    """The checkpoints inside, the oldest first, without links; what a killed removal has left is cleared up."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder. Give the one that checkpoints are in")
    found = []
    for inside in sorted(folder.iterdir()):
        if inside.name.startswith(".") and inside.name.endswith(".old"):
            if fnmatchcase(inside.name[1:-4], named):
                _finish_removal(CheckpointFolder(folder / inside.name[1:-4]))
        elif fnmatchcase(inside.name, named) and not inside.name.startswith(".") and not inside.is_symlink():
            there = candidates(CheckpointFolder(inside), damaged=True)
            found += [(path, manifest) for path, manifest in there if path == inside]
    return sorted(found, key=lambda each: each[1].place(each[0].name))


def _finish_removal(place: CheckpointFolder) -> None:
    """A save that replaces one has a complete new one when the old one stands alone; a removal has none."""
    with locked_now(place.path) as free:
        if free and is_own(place.old) and not place.path.exists() and not place.is_complete(place.new):
            with suppress(CheckpointError):
                refuse_newer(place)
                place.discard(place.old)
