"""Whether a manifest can be true: what it says of tensors and values, before anything is read by it.

A checksum tells damage; this tells what a program, or somebody, has written wrongly, which else would be read as other
numbers, or end in an error that names neither file nor tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from ..errors import CheckpointError, FlatFSDPError
from .manifest import Chunk, Manifest, Saved
from .nested import decode, shown, unflatten
from .raw import dtype_named

__all__ = ["prove"]


def prove(manifest: Manifest, where: str) -> None:
    """Require of a manifest that every element of each tensor lies once (in a copy for each node) within a file that it
    lists, that no two tensors share bytes unless they are one (tied parameters), and that all values can be made.

    Raises:
        CheckpointError: naming `where`, and the tensor or the value.
    """
    occupied: list[list[tuple[int, int, str]]] = [[] for _ in manifest.files]
    known = set()
    for key, saved in manifest.tensors.items():
        try:
            if key != shown(saved.path):
                raise ValueError(f"its path is {shown(saved.path)!r}")
            size = dtype_named(saved.dtype).itemsize
            chunks = list(_chunks(manifest, saved, size))
            _require_cover(chunks, saved.spec.numel)  # which proves its strides, too
        except (ValueError, FlatFSDPError) as error:
            raise CheckpointError(f"{where}: tensor {key!r}: {error}") from error
        same = (saved.dtype, saved.shape, saved.stride, tuple(map(tuple, saved.rows)))
        if same not in known:
            known.add(same)
            for chunk in chunks:
                if chunk.stop > chunk.start:
                    occupied[chunk.file].append((chunk.offset, chunk.offset + (chunk.stop - chunk.start) * size, key))
    for file, spans in zip(manifest.files, occupied, strict=True):
        _require_apart(spans, f"{where}: {file.name}")
    try:
        for key, (path, value) in manifest.values.items():
            if key != shown(path) or key in manifest.tensors:
                raise ValueError(f"{key!r} has the path {shown(path)!r}, or is a tensor, too")
            decode(value)
        paths = {key: saved.path for key, saved in manifest.tensors.items()}
        paths |= {key: path for key, (path, _) in manifest.values.items()}
        unflatten(dict.fromkeys(paths), paths)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        told = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{where}: value {key!r}: {told}") from error


def _chunks(manifest: Manifest, saved: Saved, size: int) -> Iterator[Chunk]:
    """The chunks of a tensor, each within its file."""
    for row in saved.rows:
        if len(row) < 2 or len(row) % 2:
            raise ValueError(f"a row of its chunks has {len(row)} numbers")
        if row[0] >= len(manifest.files):
            raise ValueError(f"it lies in file number {row[0]}, and there are {len(manifest.files)}")
    for chunk in saved.chunks():
        file = manifest.files[chunk.file]
        end = chunk.offset + (chunk.stop - chunk.start) * size
        if end > file.size:
            raise ValueError(f"elements [{chunk.start}, {chunk.stop}) end at byte {end} of {file.name}, of {file.size}")
        yield chunk


def _require_cover(chunks: Iterable[Chunk], numel: int) -> None:
    """Every element once; where nodes share no files, once in each of theirs."""
    start = end = 0
    files: set[int] = set()
    for chunk in sorted(chunks, key=lambda chunk: (chunk.start, chunk.stop)):
        if (chunk.start, chunk.stop) == (start, end) and chunk.file not in files and chunk.stop > chunk.start:
            files.add(chunk.file)
            continue
        if chunk.start != end:
            problem = "lie in two places" if chunk.start < end else "lie in no file"
            raise ValueError(f"elements [{min(chunk.start, end)}, {max(chunk.start, end)}) {problem}")
        start, end, files = chunk.start, chunk.stop, {chunk.file}
    if end < numel:
        raise ValueError(f"elements [{end}, {numel}) lie in no file")
    if end > numel:
        raise ValueError(f"it has {numel} elements, and {end} lie in files")


def _require_apart(spans: list[tuple[int, int, str]], where: str) -> None:
    """No two intervals of a file, (first byte, end, tensor), overlap."""
    spans.sort()
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            raise CheckpointError(
                f"{where}: tensor {one!r} and tensor {other!r} lie in the same bytes, from {start} on"
            )
