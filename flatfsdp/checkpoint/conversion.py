"""Checkpoints and weights from one format to another, in one process that holds them unsharded.

Sources: a checkpoint of flatfsdp, a folder of torch.distributed.checkpoint (DCP; FSDP1, FSDP2, ...), safetensors, or a
file written by torch.save. Targets: a checkpoint (which DCP reads, too), a file as torch.save writes it, or
safetensors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, ConfigValueError
from . import manifest
from .dcp_reader import DcpFolder
from .disk import disk
from .folders import CheckpointFolder
from .hugging_face import read_whole, write_whole
from .loading import find, is_foreign
from .ranks import CheckpointRanks
from .saving import Contents, SaveRequest, save_contents
from .tensor_file import SUFFIX

FORMATS = ("dcp", "torch", "safetensors")


def convert(source: Path, target: Path, *, to: str, part: str, overwrite: bool, trust: bool) -> None:
    """Write `source` to `target` in another format.

    Args:
        source, target: files or folders as above.
        to: "dcp" for a checkpoint, "torch" for one file, "safetensors" for a folder of weights.
        part: for safetensors, the part of the source to write; of a state without parts, everything is written.
        overwrite: replace an existing target.
        trust: read pickles that may run code.

    Raises:
        CheckpointError, ConfigValueError, OSError: with messages for users.
    """
    if to not in FORMATS:
        raise ConfigValueError(f"to: got {to!r}. Accepted: {', '.join(FORMATS)}.")
    state = read_state(source, trust=trust)
    if to == "dcp":
        if not isinstance(next(iter(state.values()), None), Mapping):
            state = {"model": state}
        save_contents(CheckpointRanks(), SaveRequest(target, overwrite), lambda: Contents.of(state))
    elif to == "torch":
        if target.exists() and not overwrite:
            raise CheckpointError(f"{target} exists; pass --overwrite to replace it")
        part_file = target.with_name(f"{target.name}.part")
        torch.save(state, part_file)
        disk().rename(part_file, target)
    else:
        write_whole(tensors_of(state, part), target, overwrite=overwrite)


def read_state(source: Path, *, trust: bool) -> dict[Any, Any]:
    """The whole state at `source`, nested, on the CPU.

    Raises:
        CheckpointError: there is nothing to read, or `trust` is required.
    """
    if source.is_file() and source.suffix != SUFFIX:
        return _torch_file(source, trust=trust)
    if is_foreign(source) and trust:
        return DcpFolder(source).read(CheckpointRanks(), {}, ())[1]
    if holds_safetensors(source):
        return dict(read_whole(source))
    found = find(CheckpointRanks(), source, check=True)
    found.require_whole()
    tensors = found.empty_tensors()
    found.read_tensors(tensors)
    state = found.nested(tensors)
    saved = [each.path for each in found.manifest.tensors.values()]
    saved += [path for path, _ in found.manifest.values.values()]
    return {name: state[name] for name in dict.fromkeys(path[0] for path in saved)}


def holds_safetensors(path: Path) -> bool:
    """Whether `path` is a safetensors file, or a folder of them that is not a checkpoint ([Note: weights])."""
    if path.is_file():
        return path.suffix == SUFFIX
    part_of_one = os.path.lexists(path / manifest.NAME) or any(path.glob("*.distcp"))  # other files of it may be lost
    return not part_of_one and any(path.glob(f"*{SUFFIX}")) and not CheckpointFolder.at(path).complete()


def _torch_file(source: Path, *, trust: bool) -> dict[Any, Any]:
    try:
        state = torch.load(source, map_location="cpu", weights_only=not trust)
    except Exception as error:  # a damaged or foreign pickle raises any class of error
        hint = "" if trust else ". Pass --trust to read a file that holds more than tensors and plain values"
        raise CheckpointError(f"{source} cannot be read: {str(error).splitlines()[0]}{hint}") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{source} holds a {type(state).__name__}. Accepted: a state dict, or a dict of state dicts"
        )
    return dict(state)


def tensors_of(state: Mapping[Any, Any], part: str) -> dict[str, torch.Tensor]:
    """The tensors of one part of a state, or of a state without parts."""
    inside = state.get(part, state)
    tensors = {name: value for name, value in inside.items() if isinstance(value, torch.Tensor)}
    if len(tensors) < len(inside):
        others = [str(name) for name in inside if name not in tensors]
        raise CheckpointError(
            f"{part}: {', '.join(others[:3])} {'is not a tensor' if len(others) == 1 else 'are not tensors'}; "
            f"safetensors hold tensors only. Choose a part of {', '.join(map(str, state))} that holds nothing else"
        )
    return tensors
