"""`save`, `load` and `async_save`: checkpoints of a model, its optimizer and whatever else a program wants back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from . import background
from .background import Saving
from .loading import empty_tensors, find, load_tensors, part_of
from .nested import flatten
from .ranks import Ranks
from .saving import Contents, Request, save_contents

__all__ = ["async_save", "load", "save"]

StatePath = str | os.PathLike[str]


def save(
    path: StatePath,
    *,
    state: Mapping[str, Any],
    overwrite: bool = False,
    per_node: bool = False,
    metrics: Mapping[str, float] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save to the folder `path`, which is a checkpoint when this returns and what it was before until then.

    Collective over `process_group`.

    Args:
        path: a folder that is not there, is empty, or, with `overwrite`, holds a checkpoint. All ranks share it.
        state: nested mappings and lists of tensors, values of sharded state dicts, and plain values (None, bool, int,
            float, str, bytes, tuples, ...). Where ranks hold the same whole tensor one of them saves it; keys that only
            some ranks hold are saved too. Plain values of one key are the same on all ranks.
        overwrite: replace a checkpoint; it is there until the new one is complete.
        per_node: for nodes that share no file system: each has a folder with what its own ranks hold.
        metrics: numbers by which `keep` can tell the best.
        process_group: the ranks that save; None for all.

    Raises:
        CheckpointError: on every rank: some rank could not do its part, does not see the folder, or holds something
            that contradicts another's.
    """
    ranks = Ranks(process_group)
    take = background.finish_before(ranks, lambda: Contents.of(state))
    save_contents(ranks, Request(path, overwrite, per_node, metrics or {}), take)


def async_save(
    path: StatePath,
    *,
    state: Mapping[str, Any],
    overwrite: bool = False,
    per_node: bool = False,
    metrics: Mapping[str, float] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Saving:
    """As `save`, but only the copying of the state to host memory is awaited; a thread saves it.

    Collective over `process_group`, whose first call makes a second group (on gloo) for the thread's messages. A save
    that has not ended is awaited by the next one.

    Returns:
        What is under way: `result(timeout=None)` waits and raises what `save` would; `done()` asks. An error that
        nobody asked for is raised by the next save.
    """
    ranks = Ranks(process_group)
    request = Request(path, overwrite, per_node, metrics or {})
    return background.start(ranks, request, lambda: Contents.of(state))


def load(
    path: StatePath,
    *,
    state: Mapping[str, Any],
    strict: bool = True,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Load the checkpoint at `path`.

    Collective over `process_group`. Ranks may be more or fewer than those that saved.

    Args:
        path: where it was saved.
        state: as it was saved, with tensors to fill.
        strict: refuse what is missing, and what is there and not wanted.
        verify: compare all files with their checksums first; each file is read once for that, by one of the ranks.
            Without it only their sizes are compared.
        process_group: the ranks that load; None for all.

    Returns:
        What was saved as ``extra``; after a save with ``per_node`` without tensors that only other nodes' ranks held.

    Raises:
        CheckpointError: on every rank: there is no complete checkpoint, it is damaged, or it does not fit.
    """
    ranks = Ranks(process_group)
    found = find(ranks, path, check=verify)
    leaves, _ = flatten(state)
    targets = {key: leaf for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    extra = empty_tensors(found, "extra")
    load_tensors(ranks, found, targets | extra, set(state), strict=strict)
    return part_of(found.manifest, "extra", extra)
