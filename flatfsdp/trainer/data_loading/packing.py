"""Pack any value into one tensor of bytes, and unpack it: tensors in it are copied once, on the sending rank.

The bytes are how many are pickled, the value pickled without its tensors, then the tensors, each at a multiple of 16.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # the itemsize of the largest dtype


def pack(value: Any) -> Tensor:
    """`value` as a 1-D tensor of uint8."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    pickled = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    start = ALIGNMENT + _aligned(pickled.numel())
    packed = torch.zeros(start + pickler.size, dtype=torch.uint8)
    packed[:8].view(torch.int64)[0] = pickled.numel()
    packed[ALIGNMENT:][: pickled.numel()] = pickled
    for offset, tensor in pickler.tensors:
        packed[start + offset :][: tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    return packed


def unpack(packed: Tensor) -> Any:
    """What was packed; bytes behind it are of no matter. Tensors in it are views of `packed`."""
    size = int(packed[:8].view(torch.int64)[0])
    pickled = ctypes.string_at(packed[ALIGNMENT:].data_ptr(), size)
    return _Unpickler(io.BytesIO(pickled), packed[ALIGNMENT + _aligned(size) :]).load()


class _Pickler(pickle.Pickler):
    """Leaves a plain tensor out, and writes its place instead."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[int, Tensor]] = []
        self.size = 0
        self._seen: dict[int, tuple[Any, ...]] = {}

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if type(value) is not Tensor or not _is_plain(value):
            return None
        if id(value) not in self._seen:  # `tensors` keeps it alive: no other gets the same id
            self._seen[id(value)] = self.size, value.dtype, tuple(value.shape)
            self.tensors.append((self.size, value))
            self.size += _aligned(value.nbytes)
        return self._seen[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: Tensor) -> None:
        super().__init__(buffer)
        self._tensors = tensors
        self._seen: dict[int, Tensor] = {}

    def persistent_load(self, found: tuple[int, torch.dtype, tuple[int, ...]]) -> Tensor:
        offset, dtype, shape = found
        size = dtype.itemsize * torch.Size(shape).numel()
        if not size:
            return torch.empty(shape, dtype=dtype)
        if offset not in self._seen:
            self._seen[offset] = self._tensors[offset:][:size].view(dtype).view(shape)
        return self._seen[offset]


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
    )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
