"""`save`, `load` and `async_save`: checkpoints of a model, its optimizer and whatever else a program needs back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..engine.state.optim.load_plan import TensorSpec
from . import background
from .background import Saving
from .dcp_reader import DcpFolder
from .folders import CheckpointFolder
from .loading import compare, find, is_foreign
from .nested_state import flatten, plain
from .ranks import CheckpointRanks
from .retention import Keeping
from .saving import Contents, SaveRequest, save_contents
from .sections import Section, parts_of

__all__ = ["async_save", "load", "save"]

FolderPath = str | os.PathLike[str]
State = Mapping[str, Any]
Keys = tuple[str | int, ...]


def save(
    path: FolderPath,
    *,
    model: nn.Module | State | None = None,
    optimizer: Optimizer | State | None = None,
    extra: State | None = None,
    overwrite: bool = False,
    per_node: bool = False,
    metrics: Mapping[str, float] | None = None,
    model_format: str = "flatfsdp",
    files: Callable[[Path], None] | None = None,
    keeping: Keeping | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save to the folder `path`, which is a checkpoint when this returns and what it was before until then.

    Collective over `process_group`.

    Args:
        path: a folder that is not there, is empty, or, with `overwrite`, holds a checkpoint. All ranks share it.
        model: of which every rank saves what it owns; no parameter is made whole. Of buffers that differ between ranks
            (running statistics) the first rank's are saved (`per_node`: of each node), with one warning. What quantized
            gradients have lost (`reduce_error_feedback`) is saved as each rank has it.
        optimizer: that of `model`. Its state is saved by the names of parameters.
        extra: nested mappings and lists of tensors and plain values (None, bool, int, float, str, bytes, tuples, ...),
            the same on all ranks where the keys are the same. What differs between ranks (states of random numbers)
            has keys that differ.
        overwrite: replace a checkpoint; it is there until the new one is complete.
        per_node: for nodes that share no file system: each has a folder with what its own ranks hold.
        metrics: numbers by which `keep` finds the best.
        model_format: "flatfsdp", or "safetensors": the model is in ``model.safetensors`` then, or in numbered files
            with an index, as `export_safetensors` has it, and only there. `load` reads it like any other, and so does
            everybody who reads safetensors; torch.distributed.checkpoint sees all but the model. With `per_node` it is
            so where the ranks of each node hold the whole model, elsewhere it is not, with a warning.
        files: puts small files (a config, a tokenizer) into the folder that it is given, before that takes its place;
            called once, on the first rank (`per_node`: of each node). They are checked and removed with the others.
        keeping: remove other checkpoints from the folder around `path` when this one is complete.
        process_group: the ranks that save; None for all.

    State dicts, of whole tensors or as `StateDictType.SHARDED_STATE_DICT` has them, will do for model and optimizer.

    Raises:
        CheckpointError: on every rank: some rank could not do its part, does not see the folder, or holds something
            that contradicts another's.
        AgreementError: on every rank: some do something else with `model`.
    """
    ranks = CheckpointRanks(process_group, "checkpoint.save()")
    request = SaveRequest(path, overwrite, per_node, metrics or {}, model_format, files, keeping)
    with ranks.calling(model):
        take = _taking(ranks, request, parts_of(model, optimizer), extra, copied=False)
        save_contents(ranks, request, background.finish_before(ranks, take))


def async_save(
    path: FolderPath,
    *,
    model: nn.Module | State | None = None,
    optimizer: Optimizer | State | None = None,
    extra: State | None = None,
    overwrite: bool = False,
    per_node: bool = False,
    metrics: Mapping[str, float] | None = None,
    model_format: str = "flatfsdp",
    files: Callable[[Path], None] | None = None,
    keeping: Keeping | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Saving:
    """As `save`, but only the copying to host memory is awaited; a thread saves the copies, and calls `files`.

    Collective over `process_group`, whose first call makes a second group (on gloo) for the thread's messages. A save
    that has not ended is awaited by the next one, and by the end of the interpreter; await it yourself before you
    destroy the process group.

    Returns:
        What is under way: `result(timeout=None)` waits and raises what `save` would; `done()` looks. An error that
        nobody asked for is raised by the next save.
    """
    ranks = CheckpointRanks(process_group, "checkpoint.async_save()")
    request = SaveRequest(path, overwrite, per_node, metrics or {}, model_format, files, keeping)
    with ranks.calling(model):
        take = _taking(ranks, request, parts_of(model, optimizer), extra, copied=True)
        return background.start(ranks, request, take)


def _taking(
    ranks: CheckpointRanks, request: SaveRequest, parts: list[Section], extra: State | None, *, copied: bool
) -> Callable[[], Contents]:
    """Find what is to be saved, in memory that nobody else writes to if `copied`. Collective."""
    doing = f"saving {CheckpointFolder.at(request.path).path}"
    ranks.agree(doing, f"a save of {_listed(parts)}{', the model as safetensors' * request.safetensors}")
    for part in parts:
        ranks.exchange(doing, partial(part.take, in_use=True))

    def take() -> Contents:
        state = {part.name: part.state for part in parts} | ({} if extra is None else {"extra": extra})
        ties = {f"{part.name}.{name}": f"{part.name}.{first}" for part in parts for name, first in part.ties.items()}
        contents = Contents.of(state, ties, frozenset(f"{part.name}.{name}" for part in parts for name in part.buffers))
        return contents.staged() if copied else contents

    return take


def load(
    path: FolderPath,
    *,
    model: nn.Module | State | None = None,
    optimizer: Optimizer | State | None = None,
    strict: bool = True,
    verify: bool = True,
    trust: bool = False,
    extra: Callable[[tuple[str | int, ...]], bool] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Load the checkpoint at `path`.

    Collective over `process_group`. Ranks may be more or fewer than those that saved, and wrap the model differently.

    Args:
        path: where it was saved.
        model, optimizer: what is to have the saved state, of each rank what it owns; either may be left out. Of
            state dicts tensors are filled in place, and other values replaced. What quantized gradients have lost
            fits only the same ranks and the same wrapping; elsewhere it begins at zero, with a warning.
        strict: refuse what is missing, and what is there and not wanted.
        verify: compare all files with their checksums first; each file is read once for that, by one of the ranks.
            Without it only their sizes are compared.
        trust: read what torch.distributed.checkpoint saved (FSDP1, FSDP2, ...), too. Its table of contents is a pickle,
            and reading a pickle runs whatever code it names.
        extra: which of the extra values to read, and return, by the keys that lead to each; None for all. May differ
            between ranks. Not for what torch.distributed.checkpoint saved.
        process_group: the ranks that load; None for all.

    Returns:
        What was saved as ``extra``. What lies in files that no rank sees (after a save with ``per_node``) is an error;
        `extra` can leave it out.
        Of what torch.distributed.checkpoint saved all that is neither under "model" nor "optimizer".

    Raises:
        CheckpointError: on every rank: there is no complete checkpoint, it is damaged, or it does not fit. Nothing has
            been loaded then, unless files could not be read.
        AgreementError: on every rank: some do something else with `model`.
    """
    ranks = CheckpointRanks(process_group, "checkpoint.load()")
    doing = f"loading {CheckpointFolder.at(path).path}"
    parts = parts_of(model, optimizer)
    with ranks.calling(model):
        ranks.agree(doing, f"a load of {_listed(parts)}, {strict=}, {verify=}, {trust=}")
        for part in parts:
            ranks.exchange(doing, partial(part.take, in_use=False))
        names = [part.name for part in parts]
        if all(ranks.exchange(doing, lambda: trust and is_foreign(path))):
            foreign = ranks.together(doing, lambda: DcpFolder(path))
            targets = ranks.together(doing, lambda: _targets(parts, foreign.tensors(), strict=strict))
            read, others = foreign.read(ranks, targets, ("model", "optimizer"))
        else:
            found = find(ranks, path, check=verify)
            values = [plain(path) for path, _ in found.manifest.values.values()]
            targets = ranks.together(doing, lambda: _targets(parts, found.tensors(), values, strict=strict))
            read, others = found.read(ranks, doing, targets, names, extra or (lambda keys: True))
        for part in parts:
            ranks.exchange(doing, lambda part=part: part.load(read.get(part.name, {})))  # type: ignore[misc]
    return others


def _listed(parts: list[Section]) -> str:
    return " and ".join(part.name for part in parts) or "nothing but extra values"


def _targets(
    parts: list[Section], there: Mapping[str, TensorSpec], values: Iterable[Keys] | None = None, *, strict: bool
) -> dict[str, torch.Tensor]:
    """The tensors to fill, by key. `values`: the keys that lead to each plain value that is there, if that is known.

    Raises:
        CheckpointError: they, or the plain entries of a model, are not what is there.
    """
    for part in parts:
        part.expect(there)
    leaves, _ = flatten({part.name: part.state for part in parts})
    targets = {key: leaf for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    shapes = {key: described.shape for key, described in there.items()}
    entries = _entries(parts, there, values) if values is not None else None
    compared = [part.name for part in parts if not part.is_optional]
    compare(shapes, targets, compared, strict=strict, entries=entries)
    return targets


def _entries(parts: list[Section], there: Iterable[str], values: Iterable[Keys]) -> tuple[list[str], list[str]]:
    """The entries of the model's state dict that are no tensors (extra states of modules), here and there.

    One that holds both tensors and plain values counts where it has either. Of an optimizer these are hyperparameters,
    which differ between versions of torch.
    """
    state = next((part.state for part in parts if part.name == "model"), None)
    if state is None:
        return [], []
    here = {f"model.{key}": None for key in state if not isinstance(state[key], torch.Tensor)}
    saved = {f"model.{path[1]}": None for path in values if len(path) > 1 and path[0] == "model"}
    saved.update({key: None for key in here if any(each.startswith(f"{key}.") for each in there)})
    return list(here), list(saved)
