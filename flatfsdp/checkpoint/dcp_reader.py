"""Folders that torch.distributed.checkpoint (DCP) wrote for FSDP1, FSDP2 or other code, read with DCP.

Their table of contents and their plain values are pickles: reading them runs any code that they name. So they are read
only with `trust=True`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..engine.state.optim.loading import TensorSpec
from ..errors import CheckpointError, by_ranks
from .nested_state import Path, unflatten
from .ranks import CheckpointRanks


class DcpFolder:
    """A trusted folder of DCP.

    Where it holds a model's parameters under their bare names, "model" is put in front of them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._metadata: Metadata = dcp.FileSystemReader(path).read_metadata()
        saved = self._metadata.state_dict_metadata
        named = any(key.startswith(("model.", "optimizer.")) for key in saved)
        self._names = {key if named else f"model.{key}": key for key in saved}

    def tensors(self) -> dict[str, TensorSpec]:
        """All tensors, by key ([Note: keys])."""
        saved = self._metadata.state_dict_metadata
        found = {name: saved[key] for name, key in self._names.items()}
        return {
            name: TensorSpec(tuple(each.size), each.properties.dtype)
            for name, each in found.items()
            if isinstance(each, TensorStorageMetadata)
        }

    def path_of(self, name: str) -> Path:
        """The path of a key."""
        data = self._metadata.planner_data or {}
        steps = data.get(self._names[name], (self._names[name],))
        path: Path = tuple((step,) if isinstance(step, int) else step for step in steps)
        return path if name == self._names[name] else ("model", *path)

    def read(
        self, ranks: CheckpointRanks, targets: Mapping[str, torch.Tensor], sections: Collection[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fill `targets`. Returned, both nested: the targets with the plain values whose first names are in `sections`,
        and everything under other first names. Collective."""
        saved = self._metadata.state_dict_metadata
        wanted: dict[str, Any] = {name: target for name, target in targets.items() if name in self._names}
        values: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for name, key in self._names.items():
            each = saved[key]
            inside = self.path_of(name)[0] in sections
            if not isinstance(each, TensorStorageMetadata):
                (values if inside else others)[name] = None
            elif not inside:
                others[name] = torch.empty(each.size, dtype=each.properties.dtype)
        state = {self._names[name]: value for name, value in (wanted | values | others).items()}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
                dcp.load(state, checkpoint_id=self._path, process_group=ranks.group, no_dist=ranks.group is None)
        except dcp.CheckpointException as error:
            failed = {rank: str(failure[0]) for rank, failure in sorted(error.failures.items())}
            raise CheckpointError(f"loading {self._path}: {by_ranks(failed, ': ')}") from error
        filled = [{name: state[self._names[name]] for name in names} for names in (wanted | values, others)]
        return self._nested(filled[0]), self._nested(filled[1])

    def _nested(self, leaves: Mapping[str, Any]) -> dict[Any, Any]:
        """The nested state of leaves given by key."""
        return unflatten(leaves, {name: self.path_of(name) for name in leaves})
