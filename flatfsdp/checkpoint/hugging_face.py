"""Weights as Hugging Face keeps them: `model.safetensors`, or numbered files with an index. No tensor is gathered.

[Note: exports] Every rank writes what it owns to its places in files of their final size, and reads what it owns into
its shards, so that neither one rank nor one unit ever holds more than its own. A file that was not written to its end
looks complete to the format and holds zeros; so an export ends with `model.safetensors.checksums.json`, the CRC-32 of
each `BLOCK` bytes of each file, and the folder takes its place only then ([Note: siblings]).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine.layout.boxes import Box
from ..engine.layout.layout import ParamSpec, Span
from ..engine.state.owned_interval import OwnedInterval
from ..errors import CheckpointError, few, refuse_type, refuse_value
from . import form
from .beside import written_by
from .disk import File, disk
from .folders import CheckpointFolder, leader_of, refuse_link
from .held import LocalTensor, held_in_place, note_writes, settle
from .loading import compare
from .lock import Lock
from .ranks import CheckpointRanks
from .raw import LARGEST, bytes_of, cut
from .reading import checksum
from .tensor_file import CHECKSUMS, SINGLE, SUFFIX, Entry, header_of, read_header

__all__ = ["export_safetensors", "load_safetensors"]

INDEX = f"{SINGLE}.index.json"
BLOCK = 2**26
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def export_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    files: Callable[[Path], None] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the parameters and buffers of `model` as safetensors files, as ``transformers`` loads them.

    Collective over `process_group`. Nothing is gathered: each rank writes its own elements to their places, and rank 0
    its buffers. Parameters with several names (tied ones) are written once, under the first.

    Args:
        model: the model, wrapped or not.
        folder: becomes the folder with ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and their index,
            when all is written; all ranks share it. It is not there, empty, or, with `overwrite`, an export.
        max_shard_size: largest file, in bytes or as "5GB", "500MiB"; larger where one tensor is.
        dtype: in which floating-point tensors are written; None for their own.
        overwrite: replace an export, with the `files` that came with it; it is there until the new one is complete. A
            checkpoint, and a folder that holds anything else, are refused.
        files: puts small files beside the weights, a configuration or a tokenizer, into the folder that it is called
            with, on the rank that leads.
        process_group: the ranks over which the model is spread; None for all.

    Raises:
        CheckpointError: on every rank: some rank could not do its part, or has another model.
        AgreementError: on every rank: some do something else with `model`.
    """
    largest = bytes_in(max_shard_size)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        refuse_value("dtype", dtype, "a floating-point dtype, or None")

    def hold() -> list[LocalTensor]:
        settle(model, "export_safetensors()")
        return held_in_place(model)

    ranks = CheckpointRanks(process_group, "export_safetensors()")
    with ranks.calling(model):
        _export(ranks, folder, hold, largest=largest, dtype=dtype, overwrite=overwrite, files=files)


def write_whole(tensors: Mapping[str, torch.Tensor], folder: Path, *, overwrite: bool) -> None:
    """`export_safetensors` of whole tensors, in one process. Those that are the same memory are written once."""
    same: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        same.setdefault(memory, []).append(name)
    held = [LocalTensor(tuple(names), tensors[names[0]].detach(), None) for names in same.values()]
    _export(CheckpointRanks(), folder, lambda: held, largest=bytes_in("5GB"), dtype=None, overwrite=overwrite)


def _export(
    ranks: CheckpointRanks,
    folder: str | os.PathLike[str],
    hold: Callable[[], list[LocalTensor]],
    *,
    largest: int,
    dtype: torch.dtype | None,
    overwrite: bool,
    files: Callable[[Path], None] | None = None,
) -> None:
    place = CheckpointFolder.at(folder, CHECKSUMS)
    lock = Lock(place.path)  # the leader's
    doing = f"exporting to {place.path}"
    held: list[LocalTensor] = []
    written: dict[Path, tuple[bytes, list[Entry]]] = {}

    def plan() -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        held.extend(hold())
        tensors = [(each.names[0], _written_as(each.value, dtype), tuple(each.value.shape)) for each in held]
        written.update(files_of(place.new, tensors, largest))
        return tensors

    _require_same(ranks.exchange(doing, plan), doing)
    leads = leader_of(place, ranks, doing, per_node=False) == ranks.rank

    def prepare() -> None:
        refuse_link(folder, overwrite=overwrite)
        lock.take()
        place.prepare(next(iter(place.complete()), None), overwrite=overwrite)

    def create() -> None:
        for path, (header, entries) in written.items():
            with disk().create(path) as file:
                file.write(header, 0)
                file.allocate(len(header) + sum(entry.size for entry in entries))

    def conclude(checksums: Sequence[Mapping[tuple[str, int], int]]) -> None:
        if len(written) > 1:
            disk().write_file(place.new / INDEX, index_of([entries for _, entries in written.values()]))
        beside = [] if files is None else [each.name for each in written_by(files, place.new)]
        lock.check()
        disk().publish(place.new / CHECKSUMS, checksums_of(checksums, beside=beside))

    def fill() -> None:
        ranks.exchange(doing, lambda: create() if leads else None)
        entries = {entry.name: entry for _, inside in written.values() for entry in inside}
        ranks.exchange(doing, lambda: _write(held, entries, first=ranks.rank == 0))
        checksums = ranks.exchange(doing, lambda: block_checksums(list(written), ranks.rank, ranks.world))
        ranks.exchange(doing, lambda: conclude(checksums) if leads else None)

    def swap() -> None:
        lock.check()
        place.swap()

    try:
        ranks.exchange(doing, lambda: prepare() if leads else None)
        try:
            fill()
        except CheckpointError:
            if leads and not place.is_complete(place.new):
                with contextlib.suppress(OSError, CheckpointError):
                    lock.check()
                    disk().remove(place.new)
            raise
        ranks.exchange(doing, lambda: swap() if leads else None)
        ranks.exchange(doing, lambda: place.drop_old() if leads else None)
    finally:
        lock.release()


def load_safetensors(
    model: nn.Module,
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load safetensors files into `model`: each rank reads what it owns, straight into its shards.

    Collective over `process_group`. The model may have been built on the meta device; dtypes may differ.

    Args:
        model: the model, wrapped or not.
        source: one file, or a folder of them, with an index or without. Every rank sees it, though not the same one.
        strict: refuse names that are missing in the files, and names there that the model has not. Tied parameters may
            be there under any of their names.
        verify: compare the files with the checksums that `export_safetensors` left, if there are any.
        process_group: the ranks over which the model is spread; None for all.

    Raises:
        CheckpointError: on every rank, with everything that is missing, unknown and of another shape; or files are
            damaged. Nothing has been loaded then.
        AgreementError: on every rank: some do something else with `model`.
    """
    ranks = CheckpointRanks(process_group, "load_safetensors()")
    doing = f"loading {os.fspath(source)}"
    there: dict[str, Entry] = {}
    held: list[LocalTensor] = []

    def look() -> None:
        there.update(_entries_at(Path(source)))
        settle(model, "load_safetensors()")
        held.extend(held_in_place(model))
        wanted = {_name_in(each, there): each.value for each in held}
        known = {name for each in held for name in each.names}
        shapes = {name: entry.shape for name, entry in there.items() if name in wanted or name not in known}
        compare(shapes, wanted, None, strict=strict)

    def read() -> None:
        with torch.no_grad(), Files() as files:
            for each in held:
                if (name := _name_in(each, there)) in there:
                    _read(files.of(there[name]), there[name], each.value)
        note_writes(model)

    with ranks.calling(model):
        ranks.exchange(doing, look)
        if verify:
            ranks.exchange(doing, lambda: _verify(sorted({entry.file for entry in there.values()}), ranks))
        ranks.exchange(doing, read)


def _name_in(held: LocalTensor, there: Mapping[str, Entry]) -> str:
    return next((name for name in held.names if name in there), held.names[0])


def bytes_in(size: int | str) -> int:
    if isinstance(size, int) and size > 0:
        return size
    if not isinstance(size, str):
        refuse_type("max_shard_size", size, 'a number of bytes, or a string such as "5GB" or "500MiB"')
    number = size.rstrip("KMGTIBkmgtib")
    unit = _UNITS.get(size[len(number) :].upper())
    if unit is None or not number.strip().isdigit():
        refuse_value("max_shard_size", size, f"a positive number and one of {', '.join(_UNITS)}")
    return int(number) * unit


def _written_as(value: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and value.dtype.is_floating_point else value.dtype


def _require_same(plans: Sequence[Any], doing: str) -> None:
    for rank, plan in enumerate(plans):
        if plan != plans[0]:
            for mine, other in itertools.zip_longest(plans[0], plan):
                if mine != other:
                    raise CheckpointError(
                        f"{doing}: ranks have different models: {mine} on rank 0, {other} on rank {rank}"
                    )


def files_of(
    folder: Path, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], largest: int
) -> dict[Path, tuple[bytes, list[Entry]]]:
    """Headers and places of the files that hold `tensors`."""
    groups: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = [[]]
    room = largest
    for tensor in tensors:
        size = prod(tensor[2]) * tensor[1].itemsize
        if size > room and groups[-1]:
            groups.append([])
            room = largest
        groups[-1].append(tensor)
        room -= size
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{n + 1:05}-of-{count:05}{SUFFIX}" for n in range(count)]
    return {folder / name: header_of(folder / name, group) for name, group in zip(names, groups, strict=True)}


def index_of(files: Sequence[Sequence[Entry]]) -> bytes:
    places = {entry.name: entry.file.name for entries in files for entry in entries}
    total = sum(entry.size for entries in files for entry in entries)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode() + b"\n"


def read_whole(source: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file or a folder, on the CPU, whole."""
    found = {}
    with Files() as files:
        for name, entry in _entries_at(source).items():
            found[name] = torch.empty(entry.shape, dtype=entry.dtype)
            _read(files.of(entry), entry, found[name])
    return found


def entries_of(source: Path, *, check: bool) -> list[Entry]:
    """What is in a file or a folder; with `check` compared with its checksums, if it has some.

    Raises:
        CheckpointError: it is damaged, or no such thing.
    """
    entries = list(_entries_at(source).values())
    if check:
        _verify(sorted({entry.file for entry in entries}), CheckpointRanks())
    return entries


# --- elements ---------------------------------------------------------------------------------------------------------


class Files:
    """Open files, whose names may be relative to a folder; a context that closes them."""

    def __init__(self, folder: Path = Path(), *, write: bool = False) -> None:
        self._folder = folder
        self._write = write
        self._open: dict[Path, File] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *details: object) -> None:
        for file in self._open.values():
            file.__exit__(*details)

    def of(self, entry: Entry) -> File:
        """The file that `entry` is in."""
        if entry.file not in self._open:
            self._open[entry.file] = disk().open(self._folder / entry.file, write=self._write)
        return self._open[entry.file]

    def sync(self) -> None:
        """Wait for the disk."""
        for file in self._open.values():
            file.sync()


def _write(held: Sequence[LocalTensor], entries: Mapping[str, Entry], *, first: bool) -> None:
    with torch.no_grad(), Files(write=True) as files:
        for each in held:
            entry = entries[each.names[0]]
            if not each.saves(first=first):
                continue
            write_interval(files.of(entry), entry, _interval_of(entry.name, each.value, contiguous=True))
        files.sync()


def write_interval(file: File, entry: Entry, interval: OwnedInterval) -> None:
    """Write an interval of the tensor `entry` to its places, with at most `raw.LARGEST` bytes in memory twice."""
    for box in cut(interval.spec, interval.span, LARGEST // entry.dtype.itemsize):
        data = interval.data_of(box).to("cpu", entry.dtype).contiguous().view(-1)
        for place, span in runs_of(box, entry.shape):
            part = data[span.slice]
            file.write(bytes_of(part), entry.offset + place * entry.dtype.itemsize)


def _read(file: File, entry: Entry, target: torch.Tensor) -> None:
    interval = _interval_of(entry.name, target, contiguous=False)
    for box in cut(interval.spec, interval.span, LARGEST // entry.dtype.itemsize):
        block = interval.data_of(box)
        direct = block.is_contiguous() and block.device.type == "cpu" and block.dtype == entry.dtype
        data = block.view(-1) if direct else torch.empty(box.span.numel, dtype=entry.dtype)
        for place, span in runs_of(box, entry.shape):
            wanted = bytes_of(data[span.slice])
            if file.read(wanted, entry.offset + place * entry.dtype.itemsize) != len(wanted):
                raise CheckpointError(f"{file.path} has lost its end")
        if not direct:
            block.copy_(data.view(box.sizes))
    if not isinstance(target, OwnedInterval) and not target.is_contiguous():
        target.copy_(interval.local.view(target.shape))


def _interval_of(name: str, value: torch.Tensor, *, contiguous: bool) -> OwnedInterval:
    """`value` as an interval of itself; a whole tensor that is not row-major as one of a copy (`contiguous`), or of
    memory to fill."""
    if isinstance(value, OwnedInterval):
        return value
    if not value.is_contiguous():
        value = value.contiguous() if contiguous else torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return OwnedInterval(value.detach().view(-1), ParamSpec(name, tuple(value.shape)), Span(0, value.numel()))


def runs_of(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, Span]]:
    """The pieces of a box that lie together where the tensor is row-major: (first element there, elements of the box,
    itself row-major)."""
    dim = len(shape) - 1
    while dim > 0 and box.sizes[dim] == shape[dim]:
        dim -= 1
    length = prod(box.sizes[max(dim, 0) :])
    steps = [prod(shape[each + 1 :]) for each in range(len(shape))]
    first = sum(offset * step for offset, step in zip(box.offsets, steps, strict=True))
    for number, index in enumerate(itertools.product(*map(range, box.sizes[: max(dim, 0)]))):
        place = first + sum(each * step for each, step in zip(index, steps, strict=False))
        yield place, Span(number * length, (number + 1) * length)


# --- checksums, files -------------------------------------------------------------------------------------------------


def block_checksums(files: Sequence[Path], share: int, shares: int) -> dict[tuple[str, int], int]:
    """Of the blocks that fall to number `share` of `shares`, by name of the file and number of the block."""
    blocks = [(path, block) for path in files for block in range(-(-path.stat().st_size // BLOCK))]
    found = {}
    for path, block in blocks[share::shares]:
        found[path.name, block] = checksum(path, block * BLOCK, min(path.stat().st_size, (block + 1) * BLOCK))
    return found


def checksums_of(found: Sequence[Mapping[tuple[str, int], int]], *, beside: Sequence[str] = ()) -> bytes:
    """What is left with weights: the checksums of their blocks, and which other files were written with them."""
    files: dict[str, list[str]] = {}
    for name, block in sorted(key for each in found for key in each):
        files.setdefault(name, []).append(f"{next(each[name, block] for each in found if (name, block) in each):08x}")
    others = sorted({name.partition("/")[0] for name in beside})
    return json.dumps({"block": BLOCK, "crc32": files, "beside": others}, indent=1).encode() + b"\n"


def _verify(files: Sequence[Path], ranks: CheckpointRanks) -> None:
    path = files[0].parent / CHECKSUMS if files else Path(CHECKSUMS)
    if not path.is_file():
        return
    try:
        told = form.mapping(form.mapping(form.parse(disk().read_file(path)), "it").get("crc32"), "crc32")
        sums = {name: form.items(each, f"crc32 of {name}") for name, each in told.items()}
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    known = [file for file in files if file.name in sums]
    damaged = [
        f"{name} (bytes {block * BLOCK} to {(block + 1) * BLOCK})"
        for (name, block), crc32 in block_checksums(known, ranks.rank, ranks.world).items()
        if sums[name][block : block + 1] != [f"{crc32:08x}"]
    ]
    if damaged:
        raise CheckpointError(f"{files[0].parent}: damaged, or changed since it was exported: {', '.join(damaged)}")


def _header(path: Path) -> list[Entry]:
    try:
        return read_header(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _entries_at(source: Path) -> dict[str, Entry]:
    """The tensors of a file or a folder, by name."""
    if source.is_file():
        return {entry.name: entry for entry in _header(source)}
    place = CheckpointFolder.at(source, CHECKSUMS)
    folder = next(iter(place.complete()), place.path)
    index = folder / INDEX
    if index.is_file():
        try:
            told = form.mapping(form.mapping(form.parse(disk().read_file(index)), "it").get("weight_map"), "weight_map")
            places = {name: form.inner_name(file, f"weight_map: the file of {name}") for name, file in told.items()}
        except ValueError as error:
            raise CheckpointError(f"{index} is no index of safetensors: {error}") from error
        files = {name: {entry.name: entry for entry in _header(folder / name)} for name in sorted(set(places.values()))}
        absent = [f"{name} in {file}" for name, file in places.items() if name not in files[file]]
        if absent:
            raise CheckpointError(f"{index} names tensors that are not in their files: {few(absent)}")
        return {name: files[file][name] for name, file in places.items()}
    single = folder / SINGLE
    paths = [single] if single.is_file() else sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise CheckpointError(f"{source}: no safetensors file there")
    return {entry.name: entry for path in paths for entry in _header(path)}
