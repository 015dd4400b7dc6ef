"""`save`, `load` and `async_save`: checkpoints of a model, its optimizer and other state of a program."""

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

from ..engine.state.optim.loading import TensorSpec
from . import background
from .background import Saving
from .dcp_reader import DcpFolder
from .folders import CheckpointFolder
from .loading import compare, find, is_foreign
from .nested_state import flatten, plain
from .ranks import CheckpointRanks
from .retention import Keeping
from .saving import Contents, SaveRequest, latest, save_contents
from .sections import Section, sections_of

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
    names: Callable[[str], bool] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save to the folder `path`, which becomes a checkpoint when this returns and stays unchanged until then.

    Collective over `process_group`.

    Args:
        path: a folder that does not exist, is empty, or, with `overwrite`, holds a checkpoint. All ranks share it.
        model: each rank saves the intervals that it owns; no parameter is gathered. Of buffers that differ between
            ranks (running statistics), the first rank's are saved (`per_node`: of each node), with one warning. The
            residuals of quantized gradients (`reduce_error_feedback`) are saved for each rank.
        optimizer: the optimizer of `model`. Its state is saved by the names of parameters.
        extra: nested mappings and lists of tensors and plain values (None, bool, int, float, str, bytes, tuples, ...),
            equal on all ranks where the keys are equal. Values that differ between ranks (states of random number
            generators) need keys that differ.
        overwrite: replace a checkpoint; it stays until the new one is complete.
        per_node: for nodes that share no file system: each gets a folder with the state of its own ranks.
        metrics: numbers by which `keep` ranks checkpoints.
        model_format: "flatfsdp", or "safetensors": then the model is saved only in ``model.safetensors``, or in
            numbered files with an index, as by `export_safetensors`. `load` reads such a checkpoint like any other,
            and so does any reader of safetensors; torch.distributed.checkpoint sees everything but the model. With
            `per_node`, the ranks of each node must hold the whole model; otherwise it warns and uses "flatfsdp".
        files: a function that writes small files (a config, a tokenizer) into the new folder, its argument, before that
            replaces `path`; called once, on the first rank (`per_node`: of each node). The checksums cover them.
        keeping: remove other checkpoints from the folder around `path` when this one is complete.
        names: selects the entries of the model's state dict to save, by their names; equal on all ranks. None for all.
            `load` needs the same selection.
        process_group: the ranks that save; None for all.

    `model` and `optimizer` may also be state dicts, of whole tensors or of type `StateDictType.SHARDED_STATE_DICT`.

    Raises:
        CheckpointError: on every rank: some rank could not do its part, does not see the folder, or holds values that
            contradict another rank's.
        AgreementError: on every rank: some ranks make another call on `model`.
    """
    ranks = CheckpointRanks(process_group, "checkpoint.save()")
    request = SaveRequest(path, overwrite, per_node, metrics or {}, model_format, files, keeping)
    with ranks.calling(model):
        take = _taking(ranks, request, sections_of(model, optimizer), extra, names, copied=False)
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
    names: Callable[[str], bool] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Saving:
    """Like `save`, but returns once the state is copied to host memory; a thread saves the copies and calls `files`.

    Collective over `process_group`; the first call for a group creates a second group (on gloo) for the thread's
    messages. The next save, and the end of the interpreter, wait for a save that has not ended; wait for it yourself
    before you destroy the process group.

    Returns:
        A handle: `result(timeout=None)` waits and raises the errors of `save`; `done()` polls. An error that no
        `result()` has raised is raised by the next save.
    """
    ranks = CheckpointRanks(process_group, "checkpoint.async_save()")
    request = SaveRequest(path, overwrite, per_node, metrics or {}, model_format, files, keeping)
    with ranks.calling(model):
        take = _taking(ranks, request, sections_of(model, optimizer), extra, names, copied=True)
        return background.start(ranks, request, take)


def _taking(
    ranks: CheckpointRanks,
    request: SaveRequest,
    sections: list[Section],
    extra: State | None,
    names: Callable[[str], bool] | None,
    *,
    copied: bool,
) -> Callable[[], Contents]:
    """Collect the state to save, in memory that nothing else writes to if `copied`. Collective."""
    doing = f"saving {CheckpointFolder.at(request.path).path}"
    ranks.agree(doing, f"a save of {_listed(sections)}{', the model as safetensors' * request.safetensors}")
    for section in sections:
        ranks.exchange(doing, partial(section.take, in_use=True))
        section.select(names)

    def take() -> Contents:
        state = {section.name: section.state for section in sections} | ({} if extra is None else {"extra": extra})
        ties = {f"{each.name}.{name}": f"{each.name}.{first}" for each in sections for name, first in each.ties.items()}
        contents = Contents.of(
            state, ties, frozenset(f"{each.name}.{name}" for each in sections for name in each.buffers)
        )
        return contents.staged(background.host_of(ranks)) if copied else contents

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
    names: Callable[[str], bool] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Load the checkpoint at `path`.

    Collective over `process_group`. The number of ranks and the wrapping of the model may differ from the save's.

    Args:
        path: the folder of the checkpoint.
        model, optimizer: the destinations of the saved state; each rank loads its elements; either is optional. In
            state dicts, tensors are filled in place, and other values replaced. Residuals of quantized gradients are
            loaded only for the same ranks and wrapping; otherwise they begin at zero, with a warning.
        strict: raise if entries are missing or unexpected.
        verify: compare all files with their checksums first; one of the ranks reads each file for this. Without it,
            only sizes are compared.
        trust: also read checkpoints of torch.distributed.checkpoint (FSDP1, FSDP2, ...). Their table of contents is a
            pickle, and reading a pickle runs any code that it names.
        extra: selects the extra values to read and return, by the keys that lead to each; None for all. May differ
            between ranks. Not supported for checkpoints of torch.distributed.checkpoint.
        names: selects the entries of the model's state dict to load, by their names; equal on all ranks. None for all.
            The other entries keep their values.
        process_group: the ranks that load; None for all.

    Returns:
        The value saved as ``extra``. An entry in files that no rank sees (after a save with ``per_node``) is an error;
        `extra` can exclude it.
        For a checkpoint of torch.distributed.checkpoint, everything that is under neither "model" nor "optimizer".

    Raises:
        CheckpointError: on every rank: there is no complete checkpoint, it is damaged, or it does not fit. Nothing has
            been loaded then, unless files could not be read.
        AgreementError: on every rank: some ranks make another call on `model`.
    """
    ranks = CheckpointRanks(process_group, "checkpoint.load()")
    doing = f"loading {CheckpointFolder.at(path).path}"
    sections = sections_of(model, optimizer)
    with ranks.calling(model):
        ranks.agree(doing, f"a load of {_listed(sections)}, {strict=}, {verify=}, {trust=}")
        for section in sections:
            ranks.exchange(doing, partial(section.take, in_use=False))
            section.select(names)
        if all(ranks.exchange(doing, lambda: trust and is_foreign(path))):
            foreign = ranks.together(doing, lambda: DcpFolder(path))
            targets = ranks.together(doing, lambda: _targets(sections, foreign.tensors(), strict=strict))
            read, others = foreign.read(ranks, targets, ("model", "optimizer"))
        else:
            found = find(ranks, path, check=verify)
            values = [plain(path) for path, _ in found.manifest.values.values()]
            targets = ranks.together(doing, lambda: _targets(sections, found.tensors(), values, strict=strict))
            inside = [section.name for section in sections]
            read, others = found.read(ranks, doing, targets, inside, extra or (lambda keys: True))
        for section in sections:
            ranks.exchange(doing, lambda section=section: section.load(read.get(section.name, {})))  # type: ignore[misc]
    if model is not None:
        latest.append(CheckpointFolder.at(path).path)
    return others


def _listed(sections: list[Section]) -> str:
    return " and ".join(section.name for section in sections) or "nothing but extra values"


def _targets(
    sections: list[Section], there: Mapping[str, TensorSpec], values: Iterable[Keys] | None = None, *, strict: bool
) -> dict[str, torch.Tensor]:
    """The tensors to fill, by key. `values`: the keys that lead to each saved plain value, if they are known.

    Raises:
        CheckpointError: these tensors, or the plain entries of a model, do not match the checkpoint.
    """
    for section in sections:
        section.expect(there)
    leaves, _ = flatten({section.name: section.state for section in sections})
    targets = {key: leaf for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    shapes = {key: described.shape for key, described in there.items()}
    entries = _entries(sections, there, values) if values is not None else None
    compared = [section.name for section in sections if not section.is_optional]
    compare(shapes, targets, compared, strict=strict, entries=entries)
    return targets


def _entries(sections: list[Section], there: Iterable[str], values: Iterable[Keys]) -> tuple[list[str], list[str]]:
    """The entries of the model's state dict that are not tensors (extra states of modules): own ones, and saved ones.

    An entry with both tensors and plain values counts for a side that has either. An optimizer's entries of this kind
    are hyperparameters, which differ between versions of torch.
    """
    state = next((section.state for section in sections if section.name == "model"), None)
    if state is None:
        return [], []
    here = {f"model.{key}": None for key in state if not isinstance(state[key], torch.Tensor)}
    saved = {f"model.{path[1]}": None for path in values if len(path) > 1 and path[0] == "model"}
    saved.update({key: None for key in here if any(each.startswith(f"{key}.") for each in there)})
    return list(here), list(saved)
