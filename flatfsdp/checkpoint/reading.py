"""Reading elements of a checkpoint into memory: only the requested ones, directly to their destination.

Where a tensor's memory order is that of the file, and it is on the CPU, bytes go from the file directly into the
tensor; otherwise through a buffer of at most `intervals.LARGEST` bytes, or one row.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path

import torch

from ..engine.base.plain_data import bytes_of, dtype_named
from ..engine.layout.layout import Span
from ..engine.state.boxes import runs_of
from ..engine.state.owned_interval import OwnedInterval
from ..errors import CheckpointError
from .disk import Files, disk
from .intervals import LARGEST, cut, filling
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

    def _chunks(self, saved: SavedTensor) -> list[SavedChunk]:
        """The chunks in order; of copies for several nodes, the one that this rank sees."""
        chosen: dict[int, SavedChunk] = {}
        for chunk in saved.chunks():
            if chunk.start not in chosen or self._paths[chunk.file].is_file():
                chosen[chunk.start] = chunk
        return [chosen[start] for start in sorted(chosen)]

    def _fill(self, saved: SavedTensor, chunks: Sequence[SavedChunk], interval: OwnedInterval) -> None:
        own, local, dtype = interval.span, interval.local.detach(), dtype_named(saved.dtype)
        most = LARGEST // dtype.itemsize
        if (spec := saved.spec).stride == interval.spec.stride:
            direct = local.device.type == "cpu" and local.dtype == dtype and local.is_contiguous()
            for start in range(own.start, own.stop, own.numel if direct else most):
                span = Span(start, own.stop if direct else min(own.stop, start + most))
                into = local[span.shift(-own.start).slice]
                data = into if direct else torch.empty(span.numel, dtype=dtype)
                self._read(chunks, span, data)
                if not direct:
                    into.copy_(data)
            return
        order = spec.order
        shape = [spec.shape[dim] for dim in order]
        for box in cut(interval.spec, own, most):
            offsets, sizes = ([each[dim] for dim in order] for each in (box.offsets, box.sizes))
            data = torch.empty(box.span.numel, dtype=dtype)
            for first, span in runs_of(offsets, sizes, shape):
                self._read(chunks, Span(first, first + span.numel), data[span.slice])
            elements = data.view(sizes).permute([order.index(dim) for dim in range(len(order))])
            interval.data_of(box).copy_(elements)

    def _read(self, chunks: Sequence[SavedChunk], span: Span, into: torch.Tensor) -> None:
        """Read the elements `span` of the tensor, in the file's order, into a CPU tensor of the saved dtype."""
        done, wanted, size = span.start, bytes_of(into), into.element_size()
        for chunk in chunks[max(0, bisect_right(chunks, done, key=attrgetter("start")) - 1) :]:
            if not chunk.start <= done < min(chunk.stop, span.stop):
                break
            stop = min(chunk.stop, span.stop)
            piece = wanted[(done - span.start) * size : (stop - span.start) * size]
            try:
                file = self._files[self._paths[chunk.file]]
            except FileNotFoundError:
                raise _missing(self._paths[chunk.file]) from None
            offset = chunk.offset + (done - chunk.start) * size
            if file.read(piece, offset) != len(piece):
                raise CheckpointError(f"{file.path} ends before byte {offset + len(piece)}: the file is truncated")
            done = stop
        if done < span.stop:
            raise CheckpointError(f"element {done} of a tensor is in no file")


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
