"""Checksums of the values that a rank began with, as long as nothing has written to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from ..device.fake_tensors import is_memoryless

if TYPE_CHECKING:
    from ..flat.flat_param import FlatParamHandle


def checksum(tensor: torch.Tensor) -> int:
    """A sum over the bits of `tensor`: equal values give equal sums on every rank. 0 in a rehearsal, without values."""
    if is_memoryless():
        return 0
    flat = tensor.detach().contiguous().view(-1)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size())
    if words is None:
        flat, words = flat.view(torch.uint8), torch.uint8
    return int(flat.view(words).sum(dtype=torch.int64)) if flat.numel() else 0


class InitialChecksums:
    """What one unit's parameters were before they were sharded.

    A parameter counts as written to when this rank's piece of it has changed; that is read from the piece itself,
    because a write through `.data` leaves no trace in version counters.
    """

    def __init__(self, leaves: Iterable[tuple[torch.Tensor, str]]) -> None:
        """Sum up whole parameters (with their paths), before they are sharded."""
        self._whole = {path: checksum(leaf) for leaf, path in leaves}
        self._pieces: list[dict[int, int]] = []

    def seal(self, handles: Sequence[FlatParamHandle]) -> None:
        """Sum up this rank's pieces, right after sharding."""
        self._pieces = [_pieces(handle) for handle in handles]

    def unchanged(self, handles: Sequence[FlatParamHandle]) -> list[tuple[str, int | None]]:
        """Per parameter in layout order: its path, and its checksum unless this rank's piece was written to since."""
        out: list[tuple[str, int | None]] = []
        for handle, before in zip(handles, self._pieces, strict=True):
            now = _pieces(handle)
            for index, spec in enumerate(handle.layout.params):
                unwritten = before.get(index) == now.get(index)
                out.append((spec.name, self._whole[spec.name] if unwritten else None))
        return out


def _pieces(handle: FlatParamHandle) -> dict[int, int]:
    return {owned.index: checksum(handle.shard[owned.in_shard.slice]) for owned in handle.layout.owned(handle.rank)}
