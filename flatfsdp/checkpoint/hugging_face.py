"""Weights in the format of Hugging Face: `model.safetensors`, or numbered files with an index. No tensor is gathered.

[Note: exports] Every rank writes the elements that it owns to their offsets in files of final size, and reads them into
its shards, so that no rank ever holds more than its own elements. A file that was not written completely looks complete
to the format and holds zeros. So an export ends with `model.safetensors.checksums.json`, the CRC-32 of each `BLOCK`
bytes of each file, and the folder takes its place only then ([Note: siblings]).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine.models.rest import check_idle, quiesce
from ..engine.models.walks import units_in
from ..engine.state.named_param import NamedParam, named_buffers, named_state, refuse_rows_of_their_class
from ..errors import CheckpointError, few, refuse_type, refuse_value
from . import form
from .disk import Files, disk
from .folders import CheckpointFolder, refuse_link
from .intervals import intervals_of
from .loading import compare
from .ranks import CheckpointRanks
from .replacement import Replacement, written_by
from .tensor_file import CHECKSUMS, SINGLE, SUFFIX, Entry, read_header
from .weights import INDEX, BlockChecksums, Described, WeightFiles, checksums_of, verify_checksums

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
    """Write the parameters and buffers of `model` as safetensors files, in the format that ``transformers`` loads.

    Collective over `process_group`. Nothing is gathered: each rank writes its own elements to their offsets, and rank 0
    its buffers. Parameters with several names (tied ones) are written once, under the first.

    Args:
        model: the model, wrapped or not.
        folder: becomes the folder with ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and their index,
            when all is written; all ranks share it. It must not exist, be empty, or, with `overwrite`, be an export.
        max_shard_size: the largest size of a file, in bytes or as "5GB", "500MiB"; a single tensor may exceed it.
        dtype: the dtype of written floating-point tensors; None for their own.
        overwrite: replace an export, with the `files` that came with it; it stays until the new one is complete. A
            checkpoint, and a folder with any other contents, are refused.
        files: a function that writes small files (a configuration, a tokenizer) next to the weights, into the folder
            that is its argument; called on the rank that leads.
        process_group: the ranks over which the model is sharded; None for all.

    Raises:
        CheckpointError: on every rank: some rank could not do its part, or has another model.
        AgreementError: on every rank: some ranks make another call on `model`.
    """
    largest = bytes_in(max_shard_size)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        refuse_value("dtype", dtype, "a floating-point dtype, or None")

    ranks = CheckpointRanks(process_group, "export_safetensors()")
    with ranks.calling(model):
        find_params = partial(_params_at_rest, model, "export_safetensors()")
        _export(ranks, folder, find_params, largest=largest, dtype=dtype, overwrite=overwrite, files=files)


def write_whole(tensors: Mapping[str, torch.Tensor], folder: Path, *, overwrite: bool) -> None:
    """`export_safetensors` of whole tensors, in one process. Tensors that share memory are written once."""
    same: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        same.setdefault(memory, []).append(name)
    params = [NamedParam(names[0], tuple(names), tensors[names[0]]) for names in same.values()]
    _export(CheckpointRanks(), folder, lambda: params, largest=bytes_in("5GB"), dtype=None, overwrite=overwrite)


def _export(
    ranks: CheckpointRanks,
    folder: str | os.PathLike[str],
    find_params: Callable[[], list[NamedParam]],
    *,
    largest: int,
    dtype: torch.dtype | None,
    overwrite: bool,
    files: Callable[[Path], None] | None = None,
) -> None:
    location = CheckpointFolder.at(folder, CHECKSUMS)
    export = Replacement(ranks, location, f"exporting to {location.path}")
    params: list[NamedParam] = []
    planned: list[WeightFiles] = []

    def plan() -> list[Described]:
        params.extend(find_params())
        values = {each.name: each.in_place() for each in params}
        tensors = [
            (name, dtype if dtype is not None and value.dtype.is_floating_point else value.dtype, tuple(value.shape))
            for name, value in values.items()
        ]
        planned.append(WeightFiles.of(tensors, largest))
        return tensors

    _require_same(export.all(plan), export.doing)
    (weights,) = planned

    def prepare() -> None:
        refuse_link(folder, overwrite=overwrite)
        export.lock.take()
        location.prepare(next(iter(location.complete()), None), overwrite=overwrite)

    def write() -> None:
        mine = [each for each in params if each.saves(first=ranks.rank == 0)]
        weights.write(location.new, ((p.name, piece) for p in mine for piece in intervals_of(p.name, p.in_place())))

    def conclude(checksums: Sequence[BlockChecksums]) -> None:
        if (index := weights.index()) is not None:
            disk().write_file(location.new / INDEX, index)
        beside = [] if files is None else [each.name for each in written_by(files, location.new)]
        export.publish(checksums_of(checksums, beside=beside))

    def fill() -> None:
        export.lead(lambda: weights.create(location.new))
        export.all(write)
        checksums = export.all(lambda: weights.checksums(location.new, ranks.rank, ranks.world))
        export.lead(lambda: conclude(checksums))

    export.run(lambda: export.lead(prepare), fill)


def load_safetensors(
    model: nn.Module,
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    verify: bool = True,
    names: Callable[[str], str | None] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load safetensors files into `model`: each rank reads the elements that it owns directly into its shards.

    Collective over `process_group`. The model may have been built on the meta device; dtypes may differ.

    Args:
        model: the model, wrapped or not.
        source: one file, or a folder of them, with an index or without. Every rank must see one; nodes may have copies.
        strict: refuse names that are missing in the files, and names in the files that the model lacks. The files may
            have tied parameters under any of their names.
        verify: compare the files with the checksums that `export_safetensors` left, if there are any.
        names: maps the name of a parameter or buffer of the model to its name in the files; None: leave that one
            unchanged. Equal on all ranks; by default both names are equal.
        process_group: the ranks over which the model is sharded; None for all.

    Raises:
        CheckpointError: on every rank, with everything that is missing, unexpected or of another shape; or files are
            damaged. Nothing has been loaded then.
        AgreementError: on every rank: some ranks make another call on `model`.
    """
    ranks = CheckpointRanks(process_group, "load_safetensors()")
    doing = f"loading {os.fspath(source)}"

    def look() -> tuple[dict[str, Entry], list[NamedParam]]:
        there = _entries_at(Path(source))
        params = _params_at_rest(model, "load_safetensors()")
        if names is not None:
            params = [found for each in params if (found := _renamed(each, names))]
        wanted = {_name_in(each, there): each.in_place() for each in params}
        known = {name for each in params for name in each.names}
        shapes = {name: entry.shape for name, entry in there.items() if name in wanted or name not in known}
        compare(shapes, wanted, None, strict=strict)
        return there, params

    def read() -> None:
        with torch.no_grad(), Files() as files:
            for each in params:
                if (name := _name_in(each, there)) in there:
                    there[name].read(files, each.in_place())
        # Autograd has not seen the writes: tensors derived from the shards are out of date.
        torch.autograd.graph.increment_version([handle.shard for unit in units_in(model) for handle in unit.handles])

    with ranks.calling(model):
        there, params = ranks.together(doing, look)
        if verify:
            ranks.exchange(doing, lambda: verify_checksums(files_of(there.values()), ranks.rank, ranks.world))
        ranks.exchange(doing, read)


def _params_at_rest(model: nn.Module, what: str) -> list[NamedParam]:
    """Parameters, then buffers, in the order of `model.modules()`, ready for `NamedParam.in_place`. No
    communication.

    Raises:
        UsageError: `what` (a function, for the message) was called while a unit computes, or for parameters whose class
            keeps their rows.
    """
    units = units_in(model)
    refuse_rows_of_their_class(units, what)
    quiesce(units, collective=False, check=lambda unit: check_idle(unit, what))
    return [*named_state(model), *named_buffers(model)]


def _renamed(param: NamedParam, names: Callable[[str], str | None]) -> NamedParam | None:
    """`param` under its names in the files; None where it has none there."""
    found = tuple(other for name in param.names if (other := names(name)) is not None)
    return replace(param, name=found[0], names=found) if found else None


def _name_in(param: NamedParam, there: Mapping[str, Entry]) -> str:
    return next((name for name in param.names if name in there), param.names[0])


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


def _require_same(plans: Sequence[Any], doing: str) -> None:
    for rank, plan in enumerate(plans):
        if plan != plans[0]:
            for mine, other in itertools.zip_longest(plans[0], plan):
                if mine != other:
                    raise CheckpointError(
                        f"{doing}: ranks have different models: {mine} on rank 0, {other} on rank {rank}"
                    )


def read_whole(source: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file or a folder, on the CPU, unsharded."""
    found = {}
    with Files() as files:
        for name, entry in _entries_at(source).items():
            found[name] = torch.empty(entry.shape, dtype=entry.dtype)
            entry.read(files, found[name])
    return found


def entries_of(source: Path, *, check: bool) -> list[Entry]:
    """The tensors of a file or a folder; with `check`, compared with their checksums, if there are any.

    Raises:
        CheckpointError: it is damaged, or not safetensors.
    """
    entries = list(_entries_at(source).values())
    if check:
        verify_checksums(files_of(entries), 0, 1)
    return entries


def files_of(entries: Iterable[Entry]) -> list[Path]:
    return sorted({entry.file for entry in entries})


def _entries_at(source: Path) -> dict[str, Entry]:
    """The tensors of a file or a folder, by name."""
    if source.is_file():
        return {entry.name: entry for entry in read_header(source)}
    location = CheckpointFolder.at(source, CHECKSUMS)
    folder = next(iter(location.complete()), location.path)
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = form.mapping(
                form.mapping(form.parse(disk().read_file(index)), "it").get("weight_map"), "weight_map"
            )
            weight_files = {
                name: form.inner_name(file, f"weight_map: the file of {name}") for name, file in weight_map.items()
            }
        except ValueError as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error}") from error
        files = {
            name: {entry.name: entry for entry in read_header(folder / name)}
            for name in sorted(set(weight_files.values()))
        }
        absent = [f"{name} in {file}" for name, file in weight_files.items() if name not in files[file]]
        if absent:
            raise CheckpointError(f"{index} names tensors that are not in their files: {few(absent)}")
        return {name: files[file][name] for name, file in weight_files.items()}
    single = folder / SINGLE
    paths = [single] if single.is_file() else sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise CheckpointError(f"{source}: no safetensors file there. Accepted: such a file, or a folder with some")
    return {entry.name: entry for path in paths for entry in read_header(path)}
