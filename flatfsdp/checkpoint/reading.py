"""Reading elements of a checkpoint into memory: only the requested ones, directly to their destination.

Where a tensor's memory order is that of the file, and it is on the CPU, bytes go from the file directly into the
tensor; otherwise through a buffer of at most `intervals.LARGEST` bytes, or one chunk.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from operator import sub
from pathlib import Path

import torch

from ..engine.base.plain_data import bytes_of, dtype_named
from ..engine.layout.boxes import Box, boxes_of
from ..engine.layout.layout import Span
from ..engine.state.owned_interval import OwnedInterval, block_of
from ..errors import CheckpointError
from .disk import Files, disk
from .intervals import LARGEST, filling
from .manifest import SavedChunk, SavedFile, SavedTensor
from .nested_state import shown


class TensorReader:
    """Reads tensors from files, by their numbers in `paths`."""

    def __init__(self, paths: Sequence[Path], files: Files) -> None:
        self._paths = paths
        self._files = files

    def read(self, saved: SavedTensor, target: torch.Tensor) -> None:
        """Fill `target` (an interval, or a whole tensor; of any dtype) from a tensor of the same shape.

        Raises:
            CheckpointError: a file is too short, or has no place for some elements.
            OSError: the disk reported an error.
        """
        with filling(shown(saved.path), target) as intervals:
            found = self._chunks(saved) if intervals else []
            for interval in intervals:
                if interval.span.numel:
                    self._fill(saved, found, interval)

    def _fill(self, saved: SavedTensor, chunks: Sequence[SavedChunk], interval: OwnedInterval) -> None:
        spec = saved.spec
        dtype = dtype_named(saved.dtype)
        if spec.stride == interval.spec.stride:
            self._fill_in_order(chunks, dtype, interval)
            return
        for chunk in chunks:
            for box in boxes_of(spec, Span(chunk.start, chunk.stop)):
                own = boxes_of(interval.spec, interval.span)
                meets = [(mine, both) for mine in own if (both := _overlap(box, mine)) is not None]
                if not meets:
                    continue
                data = torch.empty(box.span.numel, dtype=dtype)
                self._read(chunk, box.span, data)
                elements = data.view(box.sizes_in_memory).permute(box.back)
                for mine, (offsets, sizes) in meets:
                    target = block_of(interval.data_of(mine), _inside(mine, offsets), sizes)
                    target.copy_(block_of(elements, _inside(box, offsets), sizes))

    def _chunks(self, saved: SavedTensor) -> list[SavedChunk]:
        """The chunks in order; of copies for several nodes, the one that this rank sees."""
        chosen: dict[int, SavedChunk] = {}
        for chunk in saved.chunks():
            if chunk.start not in chosen or self._paths[chunk.file].is_file():
                chosen[chunk.start] = chunk
        return [chosen[start] for start in sorted(chosen)]

    def _fill_in_order(self, chunks: Sequence[SavedChunk], dtype: torch.dtype, interval: OwnedInterval) -> None:
        span, local = interval.span, interval.local.detach()
        direct = local.device.type == "cpu" and local.dtype == dtype and local.is_contiguous()
        most = span.numel if direct else LARGEST // dtype.itemsize
        done = span.start
        for chunk in chunks:
            while chunk.start <= done < min(chunk.stop, span.stop):
                piece = Span(done, min(span.stop, chunk.stop, done + most))
                into = local[piece.shift(-span.start).slice]
                data = into if direct else torch.empty(piece.numel, dtype=dtype)
                self._read(chunk, piece, data)
                if not direct:
                    into.copy_(data)
                done = piece.stop
        if done < span.stop:
            raise CheckpointError(f"{interval.spec.name!r}: element {done} is in none of its files")

    def _read(self, chunk: SavedChunk, span: Span, into: torch.Tensor) -> None:
        """Read the elements `span` of `chunk` into a CPU tensor of the saved dtype."""
        path = self._paths[chunk.file]
        try:
            file = self._files[path]
        except FileNotFoundError:
            raise _missing(path) from None
        wanted = bytes_of(into)
        offset = chunk.offset + (span.start - chunk.start) * into.element_size()
        if file.read(wanted, offset) != len(wanted):
            raise CheckpointError(f"{file.path} ends before byte {offset + len(wanted)}: the file is truncated")


def _overlap(one: Box, other: Box) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(offsets, sizes) of the intersection of two boxes of a tensor; None where it is empty."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    stops = [min(a + n, b + m) for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)]
    sizes = tuple(stop - start for start, stop in zip(offsets, stops, strict=True))
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


def _inside(box: Box, offsets: Sequence[int]) -> list[int]:
    return list(map(sub, offsets, box.offsets))


def _missing(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is missing. After a save with per_node=True each node has its own ranks' files: copy them into one "
        "folder to load with other ranks"
    )


def verify(folder: Path, files: Iterable[SavedFile], *, contents: bool = True) -> None:
    """Compare files with their entries in the manifest: their sizes, and with `contents` their checksums.

    Raises:
        CheckpointError: naming every file that is missing, short or changed.
    """
    inside = os.path.realpath(folder)
    problems = [problem for file in files if (problem := _problem(folder / file.name, inside, file, contents))]
    if problems:
        raise CheckpointError("; ".join(problems))


def _problem(path: Path, inside: str, file: SavedFile, contents: bool) -> str | None:
    if not os.path.lexists(path):
        return str(_missing(path))
    if not is_inside(path, inside):
        return f"{path} is, or lies behind, a link to {os.path.realpath(path)}, out of the folder"
    if not path.is_file():
        return f"{path} is not a regular file"
    size = path.stat().st_size
    if size != file.size:
        return f"{path} has {size} bytes, {file.size} were written"
    if contents and (found := checksum(path, 0, size)) != file.crc32:
        return f"{path} is damaged: its CRC-32 is {found:08x}, {file.crc32:08x} was written"
    return None


def is_inside(path: Path, folder: str) -> bool:
    """Whether a path, with all links resolved, lies below `folder`, itself a path without links."""
    return os.path.realpath(path).startswith(os.path.join(folder, ""))


def checksum(path: Path, start: int, stop: int) -> int:
    """The CRC-32 of a part of a file."""
    crc32 = 0
    buffer = memoryview(bytearray(min(stop - start, 2**22)))
    with disk().open(path) as opened:
        for offset in range(start, stop, max(1, len(buffer))):
            crc32 = zlib.crc32(buffer[: opened.read(buffer[: stop - offset], offset)], crc32)
    return crc32
