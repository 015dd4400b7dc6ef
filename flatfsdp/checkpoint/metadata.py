"""`.metadata`: the table of contents for torch.distributed.checkpoint (DCP). flatfsdp never reads it.

It lists the contents of ranks' files ([Note: archives]); not a model saved as safetensors ([Note: weights]).

It is a pickle of three objects for every chunk: 748,173 chunks for a 70B model with Adam at 1024 ranks. Pickling each
object is slow and large; this pickle maps their classes over lists of numbers (see tools/checkpoint_scale.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint.metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION

from ..engine.base import _torch
from ..engine.base.plain_data import dtype_named
from ..engine.layout.layout import Span
from ..engine.state.boxes import boxes_of
from .nested_state import Path
from .plan import PlannedInterval
from .writing import Archives

NAME = ".metadata"


class _Call:
    """An object that is unpickled as the result of `function(*arguments)`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def metadata_of(
    tensors: Mapping[str, PlannedInterval], files: Iterable[tuple[str, Archives, Archives]], values: Mapping[str, Path]
) -> bytes:
    """The contents of `.metadata`.

    Args:
        tensors: for each tensor, any interval of it.
        files: for each file, its name, tensors and values.
        values: the paths of values.
    """
    specs = {key: interval.spec for key, interval in tensors.items()}
    chunks: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {key: {} for key in tensors}  # sizes by offsets
    archives: list[tuple[str, tuple[int, ...] | None, str, int, int]] = []  # the arguments of DCP's classes
    for name, tensors_of_file, plain in files:
        for key, first, pieces in tensors_of_file:
            spec, known = specs[key], chunks[key]
            for piece in pieces:
                (box,) = boxes_of(spec, Span(first, first + piece.numel))
                first += piece.numel
                if box.offsets not in known:  # else another node has it too
                    known[box.offsets] = box.sizes
                    archives.append((key, box.offsets, name, piece.offset, piece.length))
        archives += [(key, None, name, piece.offset, piece.length) for key, _, (piece,) in plain]
    described: dict[str, Any] = {key: _tensor(interval, chunks[key]) for key, interval in tensors.items()}
    described |= {key: dcp.BytesStorageMetadata() for key in values}
    columns = [[each[number] for each in archives] for number in range(5)]
    indices, infos = _Call(map, dcp.MetadataIndex, *columns[:2]), _Call(map, _torch.storage_info(), *columns[2:])
    stored = _Call(dict, _Call(zip, indices, infos))
    paths = {key: _for_dcp(interval.path) for key, interval in tensors.items()}
    paths |= {key: _for_dcp(path) for key, path in values.items()}
    return pickle.dumps(
        _Call(dcp.Metadata, described, paths, stored, dcp.StorageMeta(), CURRENT_DCP_VERSION), protocol=4
    )


def _tensor(interval: PlannedInterval, chunks: Mapping[tuple[int, ...], tuple[int, ...]]) -> _Call:
    offsets, sizes = _Call(map, torch.Size, list(chunks)), _Call(map, torch.Size, list(chunks.values()))
    return _Call(
        dcp.TensorStorageMetadata,
        dcp.TensorProperties(dtype_named(interval.dtype)),
        torch.Size(interval.shape),
        _Call(list, _Call(map, dcp.ChunkStorageMetadata, offsets, sizes)),
    )


def _for_dcp(path: Path) -> tuple[str | int, ...]:
    # DCP has strings for keys of mappings and integers for indices of lists.
    return tuple(step[0] if isinstance(step, tuple) else str(step) for step in path)
