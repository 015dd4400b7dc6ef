"""Consistency checks of a manifest: its tensors and values are checked before anything is read.

A checksum finds damage; these checks find wrong contents by other programs, which would otherwise be read as other
numbers, or end in an error that names neither file nor tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, repeat

from ..engine.base.plain_data import dtype_named
from ..errors import CheckpointError, FlatFSDPError
from .manifest import Manifest, SavedTensor
from .nested_state import decode, shown, unflatten


def prove(manifest: Manifest, where: str) -> None:
    """Require of a manifest that every element of each tensor lies once (in a copy for each node) within a file that it
    lists, that no two tensors share bytes unless they are tied, and that all values can be decoded.

    Raises:
        CheckpointError: naming `where`, and the tensor or the value.
    """
    occupied: list[list[tuple[int, int, str]]] = [[] for _ in manifest.files]
    for key, saved in manifest.tensors.items():
        try:
            if key != shown(saved.path):
                raise ValueError(f"its path is {shown(saved.path)!r}")
            _occupy(occupied, manifest, key, dtype_named(saved.dtype).itemsize)
            _require_cover(saved.runs, saved.spec.numel)  # checks its strides, too
        except (ValueError, FlatFSDPError) as error:
            raise CheckpointError(f"{where}: tensor {key!r}: {error}") from error
    for number, file in enumerate(manifest.files):
        _require_disjoint(occupied[number], manifest, f"{where}: {file.name}")
    for key, (path, value) in manifest.values.items():
        try:
            if key != shown(path) or key in manifest.tensors:
                raise ValueError(f"its path is {shown(path)!r}, or it is a tensor, too")
            decode(value)
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            problem = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise CheckpointError(f"{where}: value {key!r}: {problem}") from error
    paths = {key: saved.path for key, saved in manifest.tensors.items()}
    paths |= {key: path for key, (path, _) in manifest.values.items()}
    try:
        unflatten(dict.fromkeys(paths), paths)
    except (TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: the keys of tensors and values do not form a nested state: {error}") from error


def _occupy(occupied: list[list[tuple[int, int, str]]], manifest: Manifest, key: str, size: int) -> None:
    """Add the intervals (first byte, end, tensor) of a tensor, with elements of `size` bytes, to those of files."""
    for run in manifest.tensors[key].runs:
        if len(run) < 2 or len(run) % 2:
            raise ValueError(f"a run of its chunks has {len(run)} numbers")
        if run[0] >= len(manifest.files):
            raise ValueError(f"it is in file number {run[0]}, and there are {len(manifest.files)}")
        file, numels, offsets = manifest.files[run[0]], run[2::2], run[3::2]
        ends = [offset + numel * size for numel, offset in zip(numels, offsets, strict=True)]
        if ends and max(ends) > file.size:
            first, last = run[1], run[1] + sum(numels)
            raise ValueError(f"elements [{first}, {last}) end at byte {max(ends)} of {file.name}, of {file.size}")
        if any(numels):
            occupied[run[0]] += zip(offsets, ends, repeat(key))


def _require_cover(runs: Iterable[Sequence[int]], numel: int) -> None:
    """Require that runs have every element once; where nodes share no files, once for each node."""
    start = end = 0
    files: set[int] = set()
    for first, stop, file in sorted((run[1], run[1] + sum(run[2::2]), run[0]) for run in runs):
        if (first, stop) == (start, end) and file not in files and stop > first:
            files.add(file)
            continue
        if first != end:
            problem = "lie in two places" if first < end else "lie in no file"
            raise ValueError(f"elements [{min(first, end)}, {max(first, end)}) {problem}")
        start, end, files = first, stop, {file}
    if end < numel:
        raise ValueError(f"elements [{end}, {numel}) lie in no file")
    if end > numel:
        raise ValueError(f"it has {numel} elements, and {end} lie in files")


def _require_disjoint(spans: list[tuple[int, int, str]], manifest: Manifest, where: str) -> None:
    """Require that no two intervals (first byte, end, tensor) of a file overlap, except those of tied tensors."""
    spans.sort()
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end and (one == other or not _are_one(manifest.tensors[one], manifest.tensors[other])):
            raise CheckpointError(f"{where}: tensor {one!r} and tensor {other!r} overlap in the file, from {start} on")


def _are_one(saved: SavedTensor, other: SavedTensor) -> bool:
    return replace(saved, path=()) == replace(other, path=())
