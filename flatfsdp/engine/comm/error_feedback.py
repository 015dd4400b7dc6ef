"""Error feedback: what quantized gradients lose is added to those that are quantized next.

[Note: error feedback] Each rank keeps a *residual* of every number that it quantizes: the sum of what it should have
sent so far, less the sum of what it has. It adds the residual before it quantizes the number again, so that the error
of the sum over many steps stays that of one. This is 1-bit SGD's (Seide et al. 2014), analyzed as EF-SGD (Karimireddy
et al. 2019); both hops have it, as in 1-bit Adam (Tang et al. 2021). Of a flat parameter with shards of n numbers a
rank holds

- along a shard axis of S ranks `(S - 1) * n` residuals, of the pieces that it sends to the others: nearly an unsharded
  gradient, which is the price;
- along a replicate axis n, of the pieces that it sends, and in the place of its own piece of their sum, which it sends
  to all.

Both are in the reduce dtype, and on the device with `cpu_offload`, too. What was delivered and the residuals of all
ranks add up to all gradients that there were. It does not matter for that which rank owes what: so units may be joined
with others from one step to the next.

What a reduction sends to nobody, because its gradients are dropped, its residuals have as sent: those of a backward
that failed begin at zero again, and so do they when a loss scale falls, with which a step is skipped. They are in the
units of what travels: before the mean is taken, and in those of a scaled loss.
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
    """Those of one flat parameter on this rank, by axis. They are zero until there are some. [Note: error feedback]"""

    def __init__(self, pieces: Sequence[int], tracker: MemoryTracker) -> None:
        """`pieces`: elements of each piece of a shard."""
        self._pieces = list(pieces)
        self._tracker = tracker
        self._held: dict[str, torch.Tensor] = {}
        self._factors: dict[str, float] = {}  # what is held is to be multiplied by, where that is used next

    def of_others(self, like: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        """Those along the shard axis: for each piece of a shard, shape (ranks, numel of the piece), of the other ranks
        in order. As `along`."""
        return list(self.along(SHARD, like, shards=ranks).view(ranks, -1).split(self._pieces, dim=1))

    def along(self, axis: str, like: torch.Tensor, *, shards: int = 1) -> torch.Tensor:
        """Those along an axis, shape (shards * shard_numel,), dtype and device as `like`; what is written to them is
        kept. To be called on the stream that works with them."""
        held = self._held.get(axis)
        if held is None or (held.dtype, held.device) != (like.dtype, like.device):
            with torch.inference_mode(False):  # it serves training, whatever needs it first
                if held is None:
                    held = torch.zeros(shards * sum(self._pieces), dtype=like.dtype, device=like.device)
                else:  # the module was cast, or moved; what overflows would stay
                    held = held.to(like.device, like.dtype).nan_to_num_(0.0, 0.0, 0.0)
            self._hold(axis, held)
        if (factor := self._factors.pop(axis, 1.0)) != 1.0:
            held.mul_(factor).nan_to_num_(0.0, 0.0, 0.0)
        return held

    def rescale(self, factor: float) -> None:
        """What travels is `factor` times as large from now on; 0: nothing is owed any more."""
        self._factors = {axis: factor * self._factors.get(axis, 1.0) for axis in self._held}

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """All that there are, by axis."""
        return {axis: self.along(axis, held) for axis, held in self._held.items()}

    def load(self, held: Mapping[str, torch.Tensor]) -> None:
        """Take over `held`, whose tensors become these."""
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
    """Those of several along the replicate axis, one behind the other; what is written to them is kept."""
    each = [own.along(REPLICATE, like) for own in residuals]
    if len(each) == 1:
        yield each[0]
        return
    together = torch.cat(each)
    yield together
    _torch.foreach_copy_(each, list(together.split([own.numel() for own in each])))


def residual_numels(shard_numel: int, groups: ProcessGroups) -> dict[str, int]:
    """How many residuals a rank holds of a flat parameter, by axis. [Note: error feedback]"""
    shards = {SHARD: groups.shard.size - 1, REPLICATE: int(groups.replicate is not None)}
    return {axis: count * shard_numel for axis, count in shards.items()}
