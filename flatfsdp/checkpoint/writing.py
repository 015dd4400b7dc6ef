"""One rank's file of a checkpoint: its intervals, and for the first rank the plain values, one archive after the other.

[Note: archives] Each chunk of a tensor is what torch.save makes of it, because torch.distributed.checkpoint (DCP)
reads such. flatfsdp itself reads the elements inside, whose place it writes down, and unpickles nothing.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import torch

from ..engine.state.owned_interval import OwnedInterval
from .disk import File, disk
from .manifest import SavedFile
from .nested import Path
from .plan import PlannedInterval
from .raw import LARGEST, Archive, as_interval, cut, dtype_named, name_of


class ArchivedChunk(NamedTuple):
    """One archive of a file: `numel` elements that begin at `inside` bytes of `length` bytes at `offset`."""

    numel: int
    offset: int
    inside: int
    length: int


# (key, first element, archives that follow each other); of a plain value (key, 0, its archive).
Rows = list[tuple[str, int, list[ArchivedChunk]]]


class WrittenFile(NamedTuple):
    """A file as it was written. `digest` is equal where `tensors` are."""

    file: SavedFile
    tensors: Rows
    values: Rows
    digest: str


def held_by(key: str, path: Path, value: torch.Tensor) -> list[PlannedInterval]:
    """What a rank that has `value` holds of the tensor `key`: nothing, or one interval."""
    dtype = name_of(value.dtype)
    if not isinstance(value, OwnedInterval):
        size = value.numel() * value.element_size()
        return [PlannedInterval(key, path, dtype, tuple(value.shape), None, 0, value.numel(), size)]
    spec, span = value.spec, value.span
    if span.is_empty and not (spec.numel == 0 and value.names_empty):
        return []
    size = span.numel * value.local.element_size()
    return [PlannedInterval(key, path, dtype, spec.shape, spec.stride, span.start, span.stop, size)]


def write(
    path: FilePath, writes: Iterable[PlannedInterval], tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]
) -> WrittenFile:
    """Write this rank's file: intervals of `tensors`, and `values`.

    At most `raw.LARGEST` bytes or one row of a tensor, whichever is more, are held in memory twice.

    Raises:
        OSError: the disk refused.
    """
    with disk().create(path) as file:
        out = _SequentialFile(file)
        rows = [
            (held.key, held.start, [out.add_tensor(each) for each in _cut(held, tensors[held.key])]) for held in writes
        ]
        plain = [(key, 0, [out.add_value(value)]) for key, value in values.items()]
        file.sync()
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    return WrittenFile(SavedFile(path.name, out.offset, out.crc32), rows, plain, digest)


def _cut(held: PlannedInterval, value: torch.Tensor) -> Iterator[torch.Tensor]:
    """The interval as tensors with memory of their own, on the CPU."""
    most = LARGEST // dtype_named(held.dtype).itemsize
    interval = as_interval(held.key, value)
    for box in cut(held.spec, interval.span, most):
        yield interval.data_of(box).to("cpu", copy=True, memory_format=torch.preserve_format)


class _SequentialFile:
    """A file that grows, and its checksum."""

    def __init__(self, file: File) -> None:
        self.offset = 0
        self.crc32 = 0
        self._file = file

    def add_tensor(self, tensor: torch.Tensor) -> ArchivedChunk:
        return self._add(Archive.of(tensor), tensor.numel())

    def add_value(self, value: Any) -> ArchivedChunk:
        return self._add(Archive.of_value(value), 0)

    def _add(self, archive: Archive, numel: int) -> ArchivedChunk:
        piece = ArchivedChunk(numel, self.offset, archive.inside, len(archive.data))
        self._file.write(archive.data, self.offset)
        self.crc32 = zlib.crc32(archive.data, self.crc32)
        self.offset += len(archive.data)
        return piece
