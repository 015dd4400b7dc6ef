"""The bytes of activations that a step keeps for its backward.

No arithmetic predicts that, so a step is taken and autograd's hooks count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


@dataclass
class SavedActivations:
    """What autograd keeps.

    Attributes:
        peak_bytes: the most at one time: of whole storages, each once, but not of parameters.
    """

    peak_bytes: int = 0
    _bytes: int = 0
    _uses: dict[int, int] = field(default_factory=dict)
    _parameters: set[int] = field(default_factory=set)

    def keep(self, tensor: Tensor) -> _SavedTensor:
        """Count a tensor that an operation keeps."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # the same for all views, and no other's while one of them lives
        if key in self._parameters or isinstance(tensor, nn.Parameter):
            return _SavedTensor(tensor, self, None, 0)
        self._uses[key] = self._uses.get(key, 0) + 1
        if self._uses[key] == 1:
            self._bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        return _SavedTensor(tensor, self, key, storage.nbytes())

    def drop(self, key: int, size: int) -> None:
        """One of those that kept it is done."""
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self._bytes -= size

    def note_parameters(self, module: nn.Module, _: Any) -> None:
        """Of a module that is about to run, and so has its parameters whole."""
        for parameter in module._parameters.values():
            if parameter is not None:
                self._parameters.add(parameter.untyped_storage()._cdata)


class _SavedTensor:
    """A tensor as long as an operation keeps it."""

    def __init__(self, tensor: Tensor, activations: SavedActivations, key: int | None, size: int) -> None:
        self.tensor, self._activations, self._key, self._size = tensor, activations, key, size

    def __del__(self) -> None:
        if self._key is not None:
            self._activations.drop(self._key, self._size)


@contextmanager
def activations_counted() -> Iterator[SavedActivations]:
    """A context whose forwards and backwards are counted."""
    activations = SavedActivations()
    noting = register_module_forward_pre_hook(activations.note_parameters)
    try:
        with torch.autograd.graph.saved_tensors_hooks(activations.keep, lambda kept: kept.tensor):
            yield activations
    finally:
        noting.remove()
