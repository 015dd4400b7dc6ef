"""One rank's file of a checkpoint: its intervals, and for the first rank the plain values, one archive after the other.

[Note: archives] Each chunk of a tensor is an archive in the format of torch.save, because torch.distributed.checkpoint
(DCP) reads that. flatfsdp itself reads only the elements inside, whose offset it records, and unpickles nothing.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import torch

from ..engine.base.plain_data import dtype_named, name_of
from ..engine.state.owned_interval import OwnedInterval
from .disk import File, disk
from .intervals import LARGEST, cut, intervals_of
from .manifest import SavedFile
from .nested_state import Path
from .plan import PlannedInterval


class ArchivedChunk(NamedTuple):
    """One archive of a file: `length` bytes at `offset` of the file; its `numel` elements begin at byte `inside`."""

    numel: int
    offset: int
    inside: int
    length: int


# (key, first element, consecutive archives); for a plain value (key, 0, its archive).
Archives = list[tuple[str, int, list[ArchivedChunk]]]


class WrittenFile(NamedTuple):
    """A written file. `digest` is equal for equal `tensors`."""

    file: SavedFile
    tensors: Archives
    values: Archives
    digest: str


def held_by(key: str, path: Path, value: torch.Tensor) -> list[PlannedInterval]:
    """The intervals of the tensor `key` that a rank with `value` holds: none, one, or several for a part of it."""
    dtype = name_of(value.dtype)
    if not isinstance(value, OwnedInterval):
        size = value.numel() * value.element_size()
        return [PlannedInterval(key, path, dtype, tuple(value.shape), None, 0, value.numel(), size)]
    size = value.local.element_size()
    return [
        PlannedInterval(key, path, dtype, spec.shape, spec.stride, span.start, span.stop, span.numel * size)
        for spec, span, names_empty in ((each.spec, each.span, each.names_empty) for each in value.of_whole())
        if span.numel or (spec.numel == 0 and names_empty)
    ]


def pieces_of(
    writes: Iterable[PlannedInterval], tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[PlannedInterval, OwnedInterval]]:
    """Each of the intervals that a rank writes, with its elements of `tensors`."""
    for key, own in groupby(writes, attrgetter("key")):
        inside = {each.span.start: each for each in intervals_of(key, tensors[key])}
        yield from ((each, inside[each.start]) for each in own)


def write(
    path: FilePath, writes: Iterable[PlannedInterval], tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]
) -> WrittenFile:
    """Write this rank's file: intervals of `tensors`, and `values`.

    At most `intervals.LARGEST` bytes or one row of a tensor, whichever is more, are held in memory twice.

    Raises:
        OSError: the disk reported an error.
    """
    with disk().create(path) as file:
        out = _SequentialFile(file)
        pieces = pieces_of(writes, tensors)
        chunks: Archives = [(each.key, each.start, [*map(out.add, _cut(each, piece))]) for each, piece in pieces]
        plain = [(key, 0, [out.add(value)]) for key, value in values.items()]
        file.sync()
    digest = hashlib.sha256(repr(chunks).encode()).hexdigest()
    return WrittenFile(SavedFile(path.name, out.offset, out.crc32), chunks, plain, digest)


def archive(value: Any) -> tuple[bytes, int]:
    """The bytes of torch.save for `value`, which torch.load reads at any offset of a file; and for a tensor, on the CPU
    with its own storage, the offset of its elements in these bytes (0 for other values)."""
    file = io.BytesIO()
    torch.save(value, file)
    # Not getbuffer(): where an exception keeps the view until garbage collection, Python 3.12 crashes.
    data = file.getvalue()
    if not isinstance(value, torch.Tensor):
        return data, 0
    with zipfile.ZipFile(file) as entries:
        (entry,) = [entry for entry in entries.infolist() if entry.filename.endswith("data/0")]
    # After the local header come the name and the padding that aligns the elements; the header has their lengths.
    lengths = data[entry.header_offset + 26 : entry.header_offset + 30]
    name, padding = (int.from_bytes(each, "little") for each in (lengths[:2], lengths[2:]))
    return data, entry.header_offset + 30 + name + padding


def _cut(planned: PlannedInterval, interval: OwnedInterval) -> Iterator[torch.Tensor]:
    """The interval as tensors with memory of their own, on the CPU."""
    most = LARGEST // dtype_named(planned.dtype).itemsize
    for box in cut(planned.spec, interval.span, most):
        yield interval.data_of(box).to("cpu", copy=True, memory_format=torch.preserve_format)


class _SequentialFile:
    """A file that grows, with its checksum."""

    def __init__(self, file: File) -> None:
        self.offset = 0
        self.crc32 = 0
        self._file = file

    def add(self, value: Any) -> ArchivedChunk:
        data, inside = archive(value)
        numel = value.numel() if isinstance(value, torch.Tensor) else 0
        chunk = ArchivedChunk(numel, self.offset, inside, len(data))
        self._file.write(data, self.offset)
        self.crc32 = zlib.crc32(data, self.crc32)
        self.offset += len(data)
        return chunk
