"""Error feedback: the quantization errors of gradients are added to the gradients that are quantized next.

[Note: error feedback] Each rank keeps a *residual* for every number that it quantizes: the sum of the exact values so
far, minus the sum of the values that were sent. It adds the residual before it quantizes the number again, so the error
of the sum over many steps is no larger than that of one step. The method is that of 1-bit SGD (Seide et al. 2014),
analyzed as EF-SGD (Karimireddy et al. 2019); both hops use it, as in 1-bit Adam (Tang et al. 2021). For a flat
parameter with shards of n numbers, a rank holds

- along a shard axis of S ranks `(S - 1) * n` residuals, of the pieces that it sends to the others: the cost is nearly
  the memory of an unsharded gradient;
- along a replicate axis n residuals, of the pieces that it sends; those in the place of its own piece belong to the
  sum, which it sends to all.

Both are in the reduce dtype, and on the device even with `cpu_offload`. The delivered values and the residuals of all
ranks add up to the sum of all gradients, regardless of how the residuals are distributed over ranks. So units may be
joined with different units from step to step.

The residuals count gradients that are dropped after a reduction as sent. Therefore residuals are set to zero after
a failed backward, and when a loss scale decreases, which means that a step was skipped. Residuals have the units of the
communicated gradients: before the mean is taken, and multiplied by the loss scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..base import _torch
from ..device.memory import MemoryTracker
from .axes import ProcessGroups

KIND = "residual"  # of bytes
SHARD, REPLICATE = "shard", "replicate"  # axes


class Residuals:
    """The residuals of one flat parameter on this rank, by axis; initially zero. [Note: error feedback]"""

    def __init__(self, pieces: Sequence[int], tracker: MemoryTracker) -> None:
        """`pieces`: elements of each piece of a shard."""
        self._pieces = list(pieces)
        self._tracker = tracker
        self._held: dict[str, torch.Tensor] = {}
        self._factors: dict[str, float] = {}  # pending factors of the residuals, applied at their next use

    def of_others(self, like: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        """Residuals along the shard axis, as `along` returns them: for each piece of a shard a tensor of shape (ranks,
        numel of the piece), whose rows belong to the other ranks in order."""
        return list(self.along(SHARD, like, shards=ranks).view(ranks, -1).split(self._pieces, dim=1))

    def along(self, axis: str, like: torch.Tensor, *, shards: int = 1) -> torch.Tensor:
        """Residuals along an axis, shape (shards * shard_numel,), dtype and device of `like`; the tensor is the storage
        itself, to be updated in place. Call it on the stream that uses the residuals."""
        held = self._held.get(axis)
        if held is None or (held.dtype, held.device) != (like.dtype, like.device):
            with torch.inference_mode(False):  # used in training, even if first requested in inference mode
                if held is None:
                    held = torch.zeros(shards * sum(self._pieces), dtype=like.dtype, device=like.device)
                else:  # the module was cast or moved; an overflow in the cast would persist
                    held = held.to(like.device, like.dtype).nan_to_num_(0.0, 0.0, 0.0)
            self._hold(axis, held)
        if (factor := self._factors.pop(axis, 1.0)) != 1.0:
            held.mul_(factor).nan_to_num_(0.0, 0.0, 0.0)
        return held

    def rescale(self, factor: float) -> None:
        """Adapt to gradients that are `factor` times as large from now on; 0 sets all residuals to zero."""
        self._factors = {axis: factor * self._factors.get(axis, 1.0) for axis in self._held}

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """All existing residuals, by axis."""
        return {axis: self.along(axis, held) for axis, held in self._held.items()}

    def load(self, held: Mapping[str, torch.Tensor]) -> None:
        """Replace the residuals by the tensors in `held`, without a copy."""
        self.rescale(0.0)
        for axis, tensor in held.items():
            self._factors.pop(axis, None)
            self._hold(axis, tensor)

    def move_to_tracker(self, tracker: MemoryTracker) -> None:
        """Count the bytes in `tracker` from now on."""
        for held in self._held.values():
            self._tracker.remove(KIND, held.nbytes)
            tracker.add(KIND, held.nbytes)
        self._tracker = tracker

    def _hold(self, axis: str, tensor: torch.Tensor) -> None:
        if (before := self._held.get(axis)) is not None:
            self._tracker.remove(KIND, before.nbytes)
        self._tracker.add(KIND, tensor.nbytes)
        self._held[axis] = tensor


@contextmanager
def joined(residuals: Sequence[Residuals], like: torch.Tensor) -> Iterator[torch.Tensor]:
    """The concatenated residuals of several flat parameters along the replicate axis; changes are written back."""
    each = [own.along(REPLICATE, like) for own in residuals]
    if len(each) == 1:
        yield each[0]
        return
    together = torch.cat(each)
    yield together
    _torch.foreach_copy_(each, list(together.split([own.numel() for own in each])))


def residual_numels(shard_numel: int, groups: ProcessGroups) -> dict[str, int]:
    """The number of residuals that a rank holds for a flat parameter, by axis. [Note: error feedback]"""
    shards = {SHARD: groups.shard.size - 1, REPLICATE: int(groups.replicate is not None)}
    return {axis: count * shard_numel for axis, count in shards.items()}
