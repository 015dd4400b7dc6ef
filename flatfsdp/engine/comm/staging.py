"""Memory in which several small tensors travel as one.

[Note: staging] A *staging buffer* has a row for each rank, and in the row a piece of each tensor. Copies into it and
out of it are counted apart (`CommStats.staged`). A backend that makes one of several operations (`CoalescingNccl`)
needs none.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from ..device.memory import FlatBuffer, MemoryTracker
from .axes import Axis


class StagingBuffer:
    """A staging buffer for certain tensors, and its views, which take longer to make than to fill. [Note: staging]

    Attributes:
        memory: shape (world * n,): a row of n elements for each rank.
        own: shape (n,): this rank's row; `own_pieces`: cut, one piece for each tensor.
        pieces, wholes: for each tensor, shape (world, numel / world): what the rows have of it; the tensor itself.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], group: Axis, tracker: MemoryTracker) -> None:
        first = tensors[0]
        self._tensors = list(tensors)
        numel = sum(tensor.numel() for tensor in tensors)
        self.memory = FlatBuffer(numel, first.dtype, first.device, tracker=tracker, kind="staging")
        self.memory.allocate()
        sizes = [tensor.numel() // group.size for tensor in tensors]
        rows = self.memory.tensor.view(group.size, -1)
        self.own = rows[group.rank]
        self.own_pieces = list(self.own.split(sizes))
        self.pieces = list(rows.split(sizes, dim=1))
        self.wholes = [tensor.view(group.size, -1) for tensor in tensors]

    def serves(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it was made for these very `tensors`."""
        return len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
