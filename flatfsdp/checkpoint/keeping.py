"""Which checkpoints of a folder stay: the last ones, and the best ones."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch.distributed as dist

from ..errors import CheckpointError, ConfigValueError, refuse_value
from .disk import disk
from .folders import Place, candidates
from .manifest import Manifest
from .ranks import Ranks

__all__ = ["keep"]


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
        folder: holds one folder for each checkpoint; whatever else it holds is left alone.
        last: how many of those saved last stay, at least 1.
        best: how many of those stay whose metric `by` (see ``metrics`` of `save`) is best; those without it are none.
        by: the name of the metric; for `best`.
        mode: "min" if smaller is better, "max" if larger is.
        process_group: the ranks that call; None for all. The first one removes.

    Returns:
        The checkpoints that have been removed, in the order in which they were saved.

    Raises:
        ConfigValueError: numbers that keep nothing, or `best` without `by`.
        CheckpointError: on every rank: the disk refused.
    """
    if last < 1:
        refuse_value("last", last, "at least 1: the checkpoint to go on from")
    if best < 0 or (best > 0) != (by is not None):
        raise ConfigValueError(
            f"best, by: got {best!r} and {by!r}. Accepted: a number above 0 and a metric's name, or none."
        )
    if mode not in ("min", "max"):
        refuse_value("mode", mode, "'min' or 'max'")
    ranks = Ranks(process_group)

    def remove() -> list[Path]:
        there = _saved_in(Path(os.path.abspath(folder)))
        staying = {path for path, _ in there[-last:]}
        values = [(path, each.metrics.get(by or "", math.nan)) for path, each in there]
        measured = [(path, value) for path, value in values if not math.isnan(value)]
        # Of equal ones the later stays.
        measured.sort(key=lambda each: each[1] if mode == "max" else -each[1])
        staying |= {path for path, _ in measured[len(measured) - best :]}
        going = [path for path, _ in there if path not in staying]
        for path in going:
            place = Place(path)
            disk().rename(path, place.old)  # at once: half a checkpoint never has a checkpoint's name
            place.drop_old()
        return going

    return ranks.exchange(f"removing checkpoints in {os.fspath(folder)}", lambda: remove() if ranks.rank == 0 else [])[
        0
    ]


def _saved_in(folder: Path) -> list[tuple[Path, Manifest]]:
    """The checkpoints inside, the oldest first. What a removal that was killed has left is cleared up."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder")
    found = []
    for inside in sorted(folder.iterdir()):
        if inside.name.startswith(".") and inside.name.endswith(".old"):
            place = Place(folder / inside.name[1:-4])
            if not place.path.exists() and not place.is_complete(place.new):  # no save's: those have a new one by then
                place.drop_old()
        elif not inside.name.startswith(".") and Place(inside).is_complete(inside):
            found += [(path, manifest) for path, manifest in candidates(Place(inside), damaged=True) if path == inside]
    return sorted(found, key=lambda each: each[1].saved)
