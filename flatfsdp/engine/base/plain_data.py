"""Serialization of Python values without pickles: objects that ranks exchange, and plain values of checkpoints.

[Note: plain data] Unpickling runs arbitrary code, and a connection between ranks does not authenticate the sender
([Note: trust]). So values are serialized as JSON. A value that JSON lacks is an object with one key: {its tag: its
contents} (`JsonWriter`, `READ`). Checkpoints have these tags, and byte strings.

Between ranks the JSON is followed by the raw bytes of tensors and byte strings. Supported are None, numbers, text,
bytes, lists, tuples, sets, dicts, paths, dtypes, devices, dense tensors (which arrive on the CPU), and flatfsdp's own
dataclasses and named tuples, which are rebuilt from their fields. Objects of user-defined classes can only be pickled:
that requires `objects` on both sides of a call. The format is the length of the JSON, as 8 bytes, the JSON, and the raw
bytes, each at a multiple of 16.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path, PosixPath, WindowsPath
from typing import Any

import torch

from ...errors import UsageError

ALIGNMENT = 16  # the itemsize of the largest dtype
_PACKAGE = __name__.partition(".")[0]


def encode(value: Any, *, objects: bool = False) -> bytes:
    """Serialize `value`, for `decode` on other ranks.

    Args:
        objects: whether it may contain objects of other classes, as pickles.

    Raises:
        UsageError: it contains a value that cannot be sent.
    """
    writer = _Writer(objects)
    head = json.dumps(writer.node(value), separators=(",", ":")).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, _padding(8 + len(head)), *writer.blobs])


def decode(data: bytes | bytearray | memoryview, *, objects: bool = False) -> Any:
    """The value that `encode` serialized. Its tensors share memory with each other, not with `data`.

    Args:
        objects: whether pickles in it are loaded, which runs the code that they name.

    Raises:
        ValueError: it was not written by `encode`, or contains a pickle without `objects`.
    """
    size = int.from_bytes(data[:8], "little")
    try:
        reader = _Reader(bytearray(data[_aligned(8 + size) :]), objects)
        return json.loads(bytes(data[8 : 8 + size]), object_hook=reader.value)
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError, RuntimeError) as error:
        raise ValueError(f"data from another rank cannot be read: {type(error).__name__}: {error}") from error


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense tensor on the CPU, to read and to write; `tensor.numpy()` needs NumPy, which torch does not
    require."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]  # which the view keeps alive
    return memoryview(array).cast("B")


def name_of(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype with this name: the inverse of `name_of`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch {torch.__version__}")
    return dtype


def gathered(content: bytes, device: torch.device, gather: Callable[[torch.Tensor], torch.Tensor]) -> list[bytes]:
    """Every rank's `content`, of at least one byte, in the order of `gather`, which concatenates the ranks' 1-D tensors
    of equal size on `device`, in any shape. Collective like `gather`, which is called twice."""
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    sizes = gather(torch.tensor([own.numel()], device=device)).view(-1).tolist()
    block = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    block[: own.numel()] = own.to(device)
    blocks = gather(block).cpu().view(len(sizes), -1)
    return [bytes(bytes_of(each[:size])) for each, size in zip(blocks, sizes, strict=True)]


class JsonWriter:
    """Makes the JSON of values. [Note: plain data]"""

    def node(self, value: Any, path: tuple[object, ...] = ()) -> Any:
        """The JSON of `value`: itself, or {its tag: its contents}. `path`: the keys that lead to it, for errors."""
        cls = type(value)
        if cls in _SCALARS:
            return value
        if cls is list:
            # Tables have millions of values: lists of scalars are not traversed.
            plain = _SCALARS.issuperset(map(type, value))
            return value if plain else [self.node(each, (*path, index)) for index, each in enumerate(value)]
        if cls is tuple:
            return {"tuple": self.node(list(value), path)}
        if cls in (dict, OrderedDict, Counter):
            pairs = [[self.node(key, path), self.node(each, (*path, key))] for key, each in value.items()]
            return {cls.__name__: pairs}
        if cls is torch.dtype:
            return {"dtype": name_of(value)}
        if cls is complex:
            return {"complex": [value.real, value.imag]}
        return self.other(value, path)

    def other(self, value: Any, path: tuple[object, ...]) -> Any:
        """The JSON of a value of another type, or an exception."""
        raise NotImplementedError


class _Writer(JsonWriter):
    def __init__(self, objects: bool) -> None:
        self.blobs: list[bytes] = []
        self._size = 0
        self._objects = objects

    def other(self, value: Any, path: tuple[object, ...]) -> Any:
        cls = type(value)
        if cls in (set, frozenset, torch.Size):
            return {cls.__name__: self.node(list(value), path)}
        if cls is bytes:
            return {"bytes": self._blob(value)}
        if cls is torch.device:
            return {"device": str(value)}
        if cls in (PosixPath, WindowsPath):
            return {"Path": str(value)}
        if cls in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
            dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            return {"Tensor": [name_of(value.dtype), list(value.shape), *self._blob(bytes(bytes_of(dense)))]}
        if cls.__module__.partition(".")[0] == _PACKAGE and (names := _fields(cls)) is not None:
            return {f"{cls.__module__}:{cls.__qualname__}": self.node([getattr(value, name) for name in names], path)}
        return {"pickle": self._blob(self._pickled(value))}

    def _pickled(self, value: Any) -> bytes:
        cls = type(value)
        if not self._objects:
            raise UsageError(
                f"a {cls.__module__}.{cls.__qualname__} cannot be sent to other ranks here. Only plain data can be "
                "sent: numbers, text, bytes, lists, tuples, sets, dicts, dtypes and dense tensors"
            )
        try:
            return pickle.dumps(value)
        except Exception as error:
            raise UsageError(
                f"a {cls.__module__}.{cls.__qualname__} cannot be sent to other ranks, not even as a pickle: {error}"
            ) from error

    def _blob(self, data: bytes) -> list[int]:
        start = self._size
        self.blobs += [data, _padding(len(data))]
        self._size += _aligned(len(data))
        return [start, len(data)]


class _Reader:
    def __init__(self, blobs: bytearray, objects: bool) -> None:
        self._blobs = blobs
        self._objects = objects

    def value(self, node: dict[str, Any]) -> Any:
        """The value of {its tag: its contents}, whose contents have been read."""
        ((tag, contents),) = node.items()
        if tag in READ:
            return READ[tag](contents)
        if tag == "Tensor":
            name, shape, start, size = contents
            if not size:
                return torch.empty(shape, dtype=dtype_named(name))
            data = torch.frombuffer(self._blobs, dtype=torch.uint8, offset=start, count=size)
            return data.view(dtype_named(name)).view(shape)
        if tag == "bytes":
            return self._bytes(contents)
        if tag == "pickle":
            if not self._objects:
                raise ValueError("a rank sent a pickle where plain data was expected")
            return pickle.loads(self._bytes(contents))
        return _class(tag)(*contents)

    def _bytes(self, interval: list[int]) -> bytes:
        start, size = interval
        return bytes(self._blobs[start : start + size])


_SCALARS = frozenset({type(None), bool, int, float, str})
# Functions that make values of their contents, by tag.
READ: dict[str, Callable[[Any], Any]] = {
    **{each.__name__: each for each in (tuple, set, frozenset, torch.Size, dict, OrderedDict)},
    "Counter": lambda pairs: Counter(dict(pairs)),
    "complex": lambda each: complex(*each),
    "dtype": dtype_named,
    "device": torch.device,
    "Path": Path,
}


def _fields(cls: Any) -> tuple[str, ...] | None:
    """The names of the constructor arguments of a dataclass or a named tuple; None for other classes."""
    if dataclasses.is_dataclass(cls):
        return tuple(each.name for each in dataclasses.fields(cls) if each.init)
    return cls._fields if issubclass(cls, tuple) and hasattr(cls, "_fields") else None


def _class(name: str) -> Any:
    """The dataclass or named tuple of flatfsdp with that name, in a module that is already imported."""
    module, _, inside = name.partition(":")
    if module.partition(".")[0] != _PACKAGE:
        raise TypeError(f"{name!r} is not a class of {_PACKAGE}")
    found: Any = sys.modules[module]
    for each in inside.split("."):
        found = vars(found)[each]
    if not isinstance(found, type) or found.__module__ != module or _fields(found) is None:
        raise TypeError(f"{name!r} is not a dataclass or a named tuple")
    return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _padding(size: int) -> bytes:
    return bytes(_aligned(size) - size)
