"""Checksums of a rank's initial values, for as long as these have not been written to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..base.overrides import is_memoryless

AT_ONCE = 2**22  # elements: torch copies what it sums up into int64, twice the memory of float32 parameters


def checksum(tensor: torch.Tensor) -> int:
    """A sum over the bits of `tensor`: equal for equal values, on every rank. 0 in a dry run, which has no values."""
    if is_memoryless():
        return 0
    flat = tensor.detach().contiguous().view(-1)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size())
    if words is None:
        flat, words = flat.view(torch.uint8), torch.uint8
    return int(sum(each.sum(dtype=torch.int64) for each in flat.view(words).split(AT_ONCE)))


class InitialChecksums:
    """Checksums of one unit's parameters before they were sharded.

    A parameter counts as written to when this rank's piece of it has changed. That is checked on the piece's values,
    because a write through `.data` does not change version counters.
    """

    def __init__(self, leaves: Iterable[tuple[torch.Tensor, str]]) -> None:
        """Compute the checksums of unsharded parameters (with their paths), before they are sharded."""
        self._whole = {path: checksum(leaf) for leaf, path in leaves}
        self._pieces: dict[str, int] = {}

    def seal(self, pieces: Mapping[str, torch.Tensor]) -> None:
        """Compute the checksums of this rank's pieces, by path, right after sharding."""
        self._pieces = {path: checksum(piece) for path, piece in pieces.items()}

    def unchanged(self, paths: Iterable[str], pieces: Mapping[str, torch.Tensor]) -> list[tuple[str, int | None]]:
        """For each of `paths` the checksum of the parameter; None if this rank's piece was written to since."""
        now = {path: checksum(piece) for path, piece in pieces.items()}
        return [(path, self._whole[path] if self._pieces.get(path) == now.get(path) else None) for path in paths]
