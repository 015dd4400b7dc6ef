"""The samples of each step, divided over ranks and microbatches: integers only.

[Note: position] There is one order of samples for all ranks: epoch after epoch, each a permutation that follows from
(seed, epoch), or the order of the dataset. A *position* is the number of samples that all ranks together have consumed,
and so the place of the next one in that order. A *step* takes the next `global_batch` samples; steps cross the borders
of epochs, and only the last step of the last epoch may be smaller. So a position is all there is to know about what
was seen: any number of ranks can go on from it, in either mode, with nothing seen twice and nothing lost.

A step is cut into *cells*, a microbatch each, and as many on every rank: as few as `batch` allows. They are contiguous,
those of rank 0 come first, and no two differ by more than one sample; nor do what ranks have of the step. Where there
are fewer samples than cells, some are empty: their microbatches are *stand-ins*, a sample of the step to be weighed 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flatfsdp.trainer.randomness import seed_of


@dataclass(frozen=True)
class DataPosition:
    """Between which two samples a loader stands. [Note: position]

    Attributes:
        position: samples consumed by all ranks together.
        epoch, offset: the epoch of the last sample consumed, or of the next one, and how many of it are consumed.
        dataset: what the `state_dict()` of an iterable dataset returned here; None where it has none.
    """

    position: int = 0
    epoch: int = 0
    offset: int = 0
    dataset: Any = None


@dataclass(frozen=True)
class StepLayout:
    """How an order of samples is cut into steps, and a step into cells. [Note: position]

    Attributes:
        global_batch: samples of a step.
        batch: the most samples of a microbatch.
        ranks: how many ranks share a step.
        total: samples of all epochs together; None where there is no end, or it shows only by reading.
        drop_last: the smaller step at the end is left out.
    """

    global_batch: int
    batch: int
    ranks: int
    total: int | None
    drop_last: bool

    def at(self, position: int) -> range:
        """The positions of the samples of the step that begins at `position`; empty where no step does."""
        stop = position + self.global_batch
        if self.total is None or stop <= self.total:
            return range(position, stop)
        return range(position, position if self.drop_last else max(position, self.total))

    def left(self, position: int) -> int | None:
        """How many steps begin at `position` or after it; None where that is not known."""
        if self.total is None:
            return None
        samples = max(0, self.total - position)
        return samples // self.global_batch if self.drop_last else _ceil(samples, self.global_batch)

    def microbatches(self, samples: int) -> int:
        """How many microbatches each rank has in a step of `samples` samples."""
        return _ceil(samples, self.ranks * self.batch)

    def shares(self, step: range, ranks: range) -> list[list[range]]:
        """For each of `ranks` the cells of `step` that are its own, as positions; the same number for each."""
        each = self.microbatches(len(step))
        cells = self.ranks * each
        borders = [step.start + _ceil(len(step) * cell, cells) for cell in range(cells + 1)]
        whole = [range(*ends) for ends in pairwise(borders)]
        return [whole[rank * each : (rank + 1) * each] for rank in ranks]


class SampleOrder:
    """The order of samples of a dataset of known length. [Note: position]"""

    def __init__(self, length: int, *, shuffle: bool, seed: int) -> None:
        self.length = length
        self._shuffle = shuffle
        self._seed = seed
        self._shuffled: tuple[int, Tensor] | None = None  # an epoch and its permutation, 8 bytes a sample

    def ids(self, positions: range) -> tuple[int, ...]:
        """The numbers in the dataset of the samples at `positions`."""
        return tuple(number for part in self._parts(positions) for number in part)

    def place(self, position: int) -> DataPosition:
        """The place at `position`."""
        return DataPosition(position, *divmod(position, self.length))

    def _parts(self, positions: range) -> Iterator[list[int] | range]:
        while positions:
            epoch, offset = divmod(positions.start, self.length)
            here = range(offset, min(offset + len(positions), self.length))
            yield self._permutation(epoch)[here.start : here.stop].tolist() if self._shuffle else here
            positions = positions[len(here) :]

    def _permutation(self, epoch: int) -> Tensor:
        if self._shuffled is None or self._shuffled[0] != epoch:
            generator = torch.Generator().manual_seed(seed_of(self._seed, epoch))
            self._shuffled = epoch, torch.randperm(self.length, generator=generator)
        return self._shuffled[1]


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
