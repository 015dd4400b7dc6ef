"""The safetensors format: a header with the offset of each tensor in the file, row-major, and then the tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path as FilePath

import torch

from ..engine.base.plain_data import bytes_of, name_of
from ..engine.layout.layout import ParamSpec, Span
from ..engine.state.boxes import runs_of
from ..engine.state.owned_interval import OwnedInterval
from ..errors import CheckpointError, ConfigTypeError
from . import form
from .disk import File, Files, disk
from .intervals import LARGEST, cut
from .manifest import SavedTensor
from .nested_state import Path
from .reading import TensorReader

SUFFIX = ".safetensors"
SINGLE = f"model{SUFFIX}"
CHECKSUMS = f"{SINGLE}.checksums.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: `offset` in bytes from the file's beginning to its first element."""

    file: FilePath
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def saved(self, file: int, path: Path) -> SavedTensor:
        """The same for a manifest, in whose list the file has number `file`."""
        # In pieces, each of them a box, so that they can be read into another memory order.
        most = LARGEST // self.dtype.itemsize
        run = [file, 0]
        for box in cut(ParamSpec(self.name, self.shape), Span(0, prod(self.shape)), most):
            run += (box.span.numel, self.offset + box.span.start * self.dtype.itemsize)
        return SavedTensor(path, name_of(self.dtype), self.shape, None, [run])

    def read(self, files: Files, target: torch.Tensor) -> None:
        """Read into `target`, an interval of the tensor or all of it."""
        TensorReader([self.file], files).read(self.saved(0, (self.name,)), target)


def header_of(file: FilePath, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[bytes, list[Entry]]:
    """The header of a file of these tensors, and the offset of each.

    Raises:
        ConfigTypeError: a dtype that the format does not know.
    """
    # The widest first: then all are aligned, and readers can map them.
    ordered = sorted(tensors, key=lambda each: -each[1].itemsize)
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    entries = []
    for name, dtype, shape in ordered:
        if dtype not in _NAMES:
            raise ConfigTypeError(f"{name} is of {dtype}. Accepted: {', '.join(map(str, _NAMES))}.")
        entries.append(Entry(file, name, dtype, shape, end))
        end += entries[-1].size
        head[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [entries[-1].offset, end]}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [replace(entry, offset=len(header) + entry.offset) for entry in entries]


def read_header(path: FilePath) -> list[Entry]:
    """The tensors of a file. No content is executed.

    Raises:
        CheckpointError: it is not a safetensors file, is truncated, or cannot be read.
    """
    try:
        with disk().open(path) as file:
            length = bytearray(8)
            size = path.stat().st_size
            if file.read(memoryview(length), 0) != 8 or (count := int.from_bytes(length, "little")) > _LARGEST_HEADER:
                raise ValueError("it has no header")
            if 8 + count > size:
                raise ValueError("its header is truncated")
            text = bytearray(count)
            file.read(memoryview(text), 8)
        head = form.mapping(form.parse(text), "its header")
        head.pop("__metadata__", None)
        entries, spans = [], []
        for name, value in head.items():
            each = form.mapping(value, name)
            if (dtype := _DTYPES.get(form.text(each.get("dtype"), f"the dtype of {name}"))) is None:
                raise ValueError(f"{name} is of dtype {each['dtype'][:20]}. Known are {', '.join(_DTYPES)}")
            shape = form.dims(each.get("shape"), f"the shape of {name}")
            offsets = form.items(each.get("data_offsets"), f"data_offsets of {name}")
            if len(offsets) != 2:
                raise ValueError(f"data_offsets of {name} are {len(offsets)} numbers")
            begin, end = (form.whole(offset, f"data_offsets of {name}") for offset in offsets)
            entry = Entry(path, name, dtype, shape, 8 + count + begin)
            if end - begin != entry.size:
                raise ValueError(f"{name} has {end - begin} bytes, its shape needs {entry.size}")
            if 8 + count + end > size:
                raise ValueError(f"it has {size} bytes, {name} ends at {8 + count + end}: it is truncated")
            entries.append(entry)
            if end > begin:
                spans.append((begin, end, name))
        spans.sort()
        for (_, end, one), (begin, _, other) in pairwise(spans):
            if begin < end:
                raise ValueError(f"{one} and {other} overlap in the file")
    except ValueError as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return entries


def write_interval(file: File, entry: Entry, interval: OwnedInterval) -> None:
    """Write an interval of the tensor `entry` to its offsets, at most `intervals.LARGEST` bytes in memory twice."""
    for box in cut(interval.spec, interval.span, LARGEST // entry.dtype.itemsize):
        data = interval.data_of(box).to("cpu", entry.dtype).contiguous().view(-1)
        for first, span in runs_of(box.offsets, box.sizes, entry.shape):
            file.write(bytes_of(data[span.slice]), entry.offset + first * entry.dtype.itemsize)
