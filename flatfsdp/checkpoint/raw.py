"""The bytes of tensors: as memory, as what torch.save makes of them, and where they lie in that."""

from __future__ import annotations

import ctypes
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.layout.boxes import Box, boxes_of
from ..engine.layout.layout import ParamSpec, Span
from ..engine.state.owned_interval import OwnedInterval

# Elements that are in host memory beside the tensors themselves, at most, in bytes.
LARGEST = 2**24


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense tensor on the CPU, to read and to write. `tensor` must outlive it."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def name_of(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype that `name_of` named."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch {torch.__version__}")
    return dtype


@dataclass(frozen=True)
class Archive:
    """What torch.save makes of one value.

    Attributes:
        data: the bytes, which torch.load reads wherever in a file they stand.
        inside: where in them a tensor's elements begin; 0 for other values.
    """

    data: bytes
    inside: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Archive:
        """Of a tensor that has its memory to itself, on the CPU."""
        file = io.BytesIO()
        torch.save(tensor, file)
        with zipfile.ZipFile(file) as entries:
            (entry,) = [entry for entry in entries.infolist() if entry.filename.endswith("data/0")]
        # Not getbuffer(): where an exception keeps the view for the garbage collector, Python 3.12 crashes.
        data = file.getvalue()
        # Behind the local header come the name and the padding that aligns the elements, of lengths that it gives.
        lengths = data[entry.header_offset + 26 : entry.header_offset + 30]
        inside = (
            entry.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        )
        return cls(data, inside)

    @classmethod
    def of_value(cls, value: Any) -> Archive:
        """Of anything else."""
        file = io.BytesIO()
        torch.save(value, file)
        return cls(file.getvalue(), 0)


def as_interval(name: str, value: torch.Tensor) -> OwnedInterval:
    """`value`, or for a whole tensor the interval that is all of it, row-major; of a copy where it is not so itself."""
    if isinstance(value, OwnedInterval):
        return value.with_local(value.local.detach())
    flat = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return OwnedInterval(flat, ParamSpec(name, tuple(value.shape)), Span(0, value.numel()))


@contextmanager
def filling(name: str, target: torch.Tensor) -> Iterator[OwnedInterval]:
    """`target` as an interval to be filled. A whole tensor that is not row-major is copied into at the end."""
    if isinstance(target, OwnedInterval):
        yield target
    elif target.is_contiguous() and not (target.is_conj() or target.is_neg()):
        yield as_interval(name, target)
    else:
        interval = as_interval(name, torch.empty(target.shape, dtype=target.dtype, device=target.device))
        yield interval
        target.detach().copy_(interval.local.view(target.shape))


def cut(spec: ParamSpec, span: Span, most: int) -> Iterator[Box]:
    """`span` of a parameter as boxes of at most `most` elements each, in order."""
    for box in boxes_of(spec, span):
        if box.span.numel <= most:
            yield box
            continue
        row = box.span.numel
        for size in box.sizes_in_memory:
            row //= size
            if size > 1:
                break
        step = max(1, most // row) * row
        for start in range(box.span.start, box.span.stop, step):
            yield from cut(spec, Span(start, min(box.span.stop, start + step)), most)
