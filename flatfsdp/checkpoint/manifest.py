"""A checkpoint's table of contents: a JSON file, written after the data, so that a folder with one is complete.

[Note: manifest] `flatfsdp.json` is one object: `{"crc32": "...", "manifest": {...}}`. The checksum covers the bytes of
the inner object. That has the size and the CRC-32 of every file, the dtype, the shape and the chunks of the elements
of every tensor, and all other values. Elements lie in *chunks*: boxes ([Note: boxes]) given as intervals in memory
order, each in one contiguous piece of a file; where nodes share no file system, in one file of each node. A tensor's
"chunks" are runs of integers: file, first element, and then, for each of the chunks that follow each other, its number
of elements and its offset in bytes.

[Note: order] The order of checkpoints must not depend on clocks, which can be set, nor on steps, which runs may repeat.
Every save therefore writes as "sequence" one more than the largest of the folder that contains it.

CRC-32, because it detects damage by disks and copies, not forgeries: it finds every flipped byte and every truncation,
and is computed as fast as a disk delivers.
"""

from __future__ import annotations

import json
import platform
import re
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import torch

from ..engine.base.plain_data import dtype_named
from ..engine.layout.layout import ParamSpec
from ..errors import CheckpointError
from . import form
from .disk import disk
from .nested_state import Path, Step, shown

NAME = "flatfsdp.json"
_VERSION = 1
_SEQUENCE = re.compile(rb'"sequence": ?(\d{1,15}),')
_ID = re.compile(rb'"id": ?"([^"]*)"')
_PREFIX = 512  # bytes that contain both, before any part of user-defined length
_HEAD = b'{"crc32": "%08x", "manifest": '
_HEAD_LENGTH = len(_HEAD % 0)


@dataclass(frozen=True)
class SavedFile:
    """A file of the checkpoint: its name (a path inside the folder, with slashes), size in bytes and CRC-32."""

    name: str
    size: int
    crc32: int

    @classmethod
    def of(cls, name: str, data: bytes) -> SavedFile:
        """The entry of a file with these contents."""
        return cls(name, len(data), zlib.crc32(data))


@dataclass(frozen=True, slots=True)
class SavedChunk:
    """Elements `[start, stop)` of a tensor in memory order, at `offset` bytes of file number `file`."""

    file: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of the checkpoint. `stride` gives its memory order where that is not row-major.

    `runs` are its chunks as in [Note: manifest].
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    runs: Sequence[Sequence[int]]

    @property
    def spec(self) -> ParamSpec:
        """The spec of the whole tensor."""
        return ParamSpec(shown(self.path), self.shape, self.stride)

    @property
    def size(self) -> int:
        """Bytes of the whole tensor."""
        return self.spec.numel * dtype_named(self.dtype).itemsize

    def chunks(self) -> Iterator[SavedChunk]:
        """Its chunks, in no order."""
        for file, start, *pieces in self.runs:
            for numel, offset in zip(pieces[::2], pieces[1::2], strict=True):
                yield SavedChunk(file, start, start + numel, offset)
                start += numel

    def to_json(self) -> dict[str, Any]:
        """The form in the manifest."""
        stride = {} if self.stride is None else {"stride": self.stride}
        return {"path": self.path, "dtype": self.dtype, "shape": self.shape, **stride, "chunks": self.runs}

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> SavedTensor:
        """Read the form of the manifest.

        Raises:
            ValueError: it is invalid.
        """
        stride = None
        if "stride" in read:
            stride = tuple(form.whole(step, "stride") for step in form.items(read["stride"], "stride"))
        runs = [form.items(run, "chunks") for run in form.items(read.get("chunks"), "chunks")]
        for run in runs:
            for each in run:
                form.whole(each, "chunks")
        shape = form.dims(read.get("shape"), "shape")
        return cls(_path(read.get("path")), form.text(read.get("dtype"), "dtype"), shape, stride, runs)


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint. [Note: manifest]

    Attributes:
        world: how many ranks saved it.
        files, tensors: of tensors by key ([Note: keys]).
        values: plain values by key, as `nested_state.encode` makes them, with their paths.
        id: identifies this save.
        saved: the time of the save, in seconds since 1970.
        metrics: the metrics given to `save`, which `keep` compares.
        sequence: [Note: order].
    """

    world: int
    files: Sequence[SavedFile]
    tensors: Mapping[str, SavedTensor]
    values: Mapping[str, tuple[Path, Any]]
    metrics: Mapping[str, float] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    saved: float = field(default_factory=time.time)
    versions: Mapping[str, str] = field(default_factory=lambda: _versions())
    sequence: int = 0

    @property
    def order(self) -> tuple[int, float]:
        """The key that sorts checkpoints in the order of saving. [Note: order]"""
        return self.sequence, self.saved

    def to_bytes(self) -> bytes:
        """The file's contents."""
        head = {
            "format": "flatfsdp checkpoint",
            "version": _VERSION,
            "sequence": self.sequence,
            "id": self.id,
            "saved": self.saved,
            "world": self.world,
            "versions": dict(self.versions),
            "metrics": dict(self.metrics),
            "files": [[file.name, file.size, f"{file.crc32:08x}"] for file in self.files],
        }
        tensors = {key: saved.to_json() for key, saved in self.tensors.items()}
        values = {key: {"path": path, "value": value} for key, (path, value) in self.values.items()}
        body = _lines(head | {"tensors": tensors, "values": values})
        return _HEAD % zlib.crc32(body) + body + b"}\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Read `to_bytes`; `where` names the file in errors.

        Raises:
            CheckpointError: the file is damaged, or of a later version (`NewerFormatError`).
        """
        body = data[_HEAD_LENGTH:-2]
        if data != _HEAD % zlib.crc32(body) + body + b"}\n":
            _refuse_newer(data, where)
            raise CheckpointError(f"{where} is damaged: its contents do not match its checksum")
        try:
            read = form.mapping(form.parse(body), "manifest")
            _refuse_later(read, where)
            files = [_file(each) for each in form.items(read.get("files"), "files")]
            if len({file.name for file in files}) < len(files):
                raise ValueError("files: one is listed twice")
            tensors = {}
            for key, each in form.mapping(read.get("tensors"), "tensors").items():
                try:
                    tensors[key] = SavedTensor.from_json(form.mapping(each, "its entry"))
                except ValueError as error:
                    raise ValueError(f"tensor {key!r}: {error}") from error
            values = {}
            for key, each in form.mapping(read.get("values"), "values").items():
                entry = form.mapping(each, f"value {key!r}")
                values[key] = _path(entry.get("path")), entry.get("value")
            metrics = form.mapping(read.get("metrics"), "metrics")
            versions = form.mapping(read.get("versions"), "versions")
            return cls(
                world=form.whole(read.get("world"), "world", least=1),
                files=files,
                tensors=tensors,
                values=values,
                metrics={name: value for name, value in metrics.items() if form.is_number(value)},
                id=form.text(read.get("id"), "id"),
                saved=form.moment(read.get("saved"), "saved"),
                versions={name: form.text(value, f"version {name!r}") for name, value in versions.items()},
                sequence=form.whole(read.get("sequence"), "sequence"),
            )
        except ValueError as error:
            raise CheckpointError(f"{where} is damaged: {error}") from error


class NewerFormatError(CheckpointError):
    """A checkpoint of a later flatfsdp: this version cannot read it, and must not replace it."""


def _refuse_later(read: Mapping[str, Any], where: str) -> None:
    version = form.whole(read.get("version"), "version", least=1)
    if version > _VERSION:
        versions = read.get("versions")
        by = versions.get("flatfsdp", "") if isinstance(versions, dict) else ""
        raise NewerFormatError(
            f"{where} is of a newer flatfsdp{f' ({by})' * isinstance(by, str) * bool(by)}: it has version {version} of "
            f"the format, and this flatfsdp reads version {_VERSION}. Update flatfsdp to read it"
        )


def _refuse_newer(data: bytes, where: str) -> None:
    """Raise for a complete file of a later version, which looks like a damaged file of this version."""
    if data[: len(b'{"crc32": "')] == b'{"crc32": "':
        return
    with suppress(ValueError):
        read = form.parse(data)
        for each in (read, read.get("manifest")) if isinstance(read, dict) else ():
            if isinstance(each, dict) and "version" in each:
                _refuse_later(each, where)


def _file(read: Any) -> SavedFile:
    fields = form.items(read, "files")
    if len(fields) != 3:
        raise ValueError(f"files: an entry has {len(fields)} fields")
    name = form.inner_name(fields[0], "files: a name")
    if name == NAME:
        raise ValueError(f"files: {NAME} lists itself")
    crc32 = form.text(fields[2], f"files: the checksum of {name}")
    if not re.fullmatch("[0-9a-f]{8}", crc32):
        raise ValueError(f"files: the checksum of {name} is {crc32[:20]!r}")
    return SavedFile(name, form.whole(fields[1], f"files: the size of {name}"), int(crc32, 16))


def sequence_in(folder: FilePath) -> int:
    """The sequence in the manifest of `folder`, of which only the beginning is read; 0 where there is none."""
    return int(_in_beginning(folder, _SEQUENCE) or 0)


def id_in(folder: FilePath) -> str:
    """The id in the manifest of `folder`, of which only the beginning is read; empty where there is none."""
    return _in_beginning(folder, _ID)


def _in_beginning(folder: FilePath, pattern: re.Pattern[bytes]) -> str:
    try:
        found = pattern.search(disk().read_file(folder / NAME, _PREFIX))
    except OSError:
        return ""
    return found[1].decode() if found else ""


def _path(read: Any) -> Path:
    steps = form.items(read, "path")
    if not steps:
        raise ValueError("path is empty")
    return tuple(_step(step) for step in steps)


def _step(step: Any) -> Step:
    if isinstance(step, str) or type(step) is int:
        return step
    if isinstance(step, list) and len(step) == 1:
        return (form.whole(step[0], "path: an index of a list"),)
    raise ValueError(f"path: a step is {str(step)[:60]}")


def _lines(entries: Mapping[str, Any]) -> bytes:
    """JSON with a line for each entry of the outer two levels, for human readers."""
    lines = []
    for name, value in entries.items():
        if isinstance(value, dict) and value:
            inner = ",\n  ".join(f"{json.dumps(key)}: {_compact(each)}" for key, each in value.items())
            lines.append(f"{json.dumps(name)}: {{\n  {inner}\n }}")
        else:
            lines.append(f"{json.dumps(name)}: {_compact(value)}")
    return ("{\n " + ",\n ".join(lines) + "\n}").encode()


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _versions() -> dict[str, str]:
    import flatfsdp  # imported completely by the time of a save

    return {"flatfsdp": flatfsdp.__version__, "torch": torch.__version__, "python": platform.python_version()}
