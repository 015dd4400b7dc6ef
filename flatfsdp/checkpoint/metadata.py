"""`.metadata`: what torch.distributed.checkpoint (DCP) wants to know of a folder, for others to read. We never do.

It is a pickle of an object for every chunk, and for its place, and for its name: written as pickle would by itself, a
70B model's with Adam at 1024 ranks takes 130 MB. Here each object is pickled as a call of its class, and offsets that
occur twice are pickled once.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .. import _torch
from ..boxes import boxes_of
from ..layout import Span
from .nested import Path
from .plan import Held
from .raw import dtype_named
from .writing import Rows

__all__ = ["NAME", "metadata_of"]

NAME = ".metadata"

_StorageInfo = _torch.storage_info()


def metadata_of(
    tensors: Mapping[str, Held], files: Iterable[tuple[str, Rows, Rows]], values: Mapping[str, Path]
) -> bytes:
    """The contents of `.metadata`.

    Args:
        tensors: any interval of each.
        files: name, tensors and values of each.
        values: the paths of values.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, Any] = {}
    specs = {key: held.spec for key, held in tensors.items()}
    for key, held in tensors.items():
        described[key] = TensorStorageMetadata(TensorProperties(dtype_named(held.dtype)), torch.Size(held.shape), [])
    sizes: dict[tuple[int, ...], torch.Size] = {}
    for name, rows, plain in files:
        for key, first, pieces in rows:
            spec, description = specs[key], described[key]
            assert isinstance(description, TensorStorageMetadata)
            for piece in pieces:
                (box,) = boxes_of(spec, Span(first, first + piece.numel))
                first += piece.numel
                offsets = torch.Size(box.offsets)
                if MetadataIndex(key, offsets) in places:  # another node has it too
                    continue
                description.chunks.append(
                    ChunkStorageMetadata(offsets, sizes.setdefault(box.sizes, torch.Size(box.sizes)))
                )
                places[MetadataIndex(key, offsets)] = _StorageInfo(name, piece.offset, piece.length)
        for key, _, (piece,) in plain:
            described[key] = BytesStorageMetadata()
            places[MetadataIndex(key)] = _StorageInfo(name, piece.offset, piece.length)
    paths = {
        key: _for_dcp(path) for key, path in [*((key, held.path) for key, held in tensors.items()), *values.items()]
    }
    whole = Metadata(described, paths, places, StorageMeta())
    whole.version = CURRENT_DCP_VERSION
    file = io.BytesIO()
    _Pickler(file).dump(whole)
    return file.getvalue()


def _for_dcp(path: Path) -> tuple[str | int, ...]:
    # DCP knows strings for keys of mappings and integers for places in lists.
    return tuple(step[0] if isinstance(step, tuple) else str(step) for step in path)


class _Pickler(pickle.Pickler):
    """Pickles the objects of which there are many as calls."""

    dispatch_table = copyreg.dispatch_table.copy()
    dispatch_table[ChunkStorageMetadata] = lambda chunk: (ChunkStorageMetadata, (chunk.offsets, chunk.sizes))
    dispatch_table[MetadataIndex] = lambda index: (
        MetadataIndex,
        (index.fqn,) if index.offset is None else (index.fqn, index.offset),
    )
    dispatch_table[_StorageInfo] = lambda info: (_StorageInfo, (info.relative_path, info.offset, info.length))
