"""The samples of each step, divided over ranks and microbatches: integers only.

[Note: position] All ranks share one order of samples: epoch after epoch, each a permutation determined by (seed,
epoch), or the order of the dataset. A *position* is the number of samples that all ranks together have consumed, and so
the place of the next one in that order. A *step* takes the next `global_batch` samples; steps may span two epochs, and
only the last step of the last epoch may be smaller. So a position fully describes the consumed samples: any number of
ranks can resume from it, in either mode, with no sample repeated or lost.

A step is divided into *cells*, one for each microbatch, with the same number on every rank, as small as `batch` allows.
Cells are contiguous, those of rank 0 come first, and their sizes, and those of ranks' shares, differ by at most one
sample. If there are fewer samples than cells, the microbatches of empty cells are *stand-ins*: a sample of weight 0.

With *whole batches*, cells do not depend on the number of ranks: each has `batch` samples, the last one of a step the
rest. Ranks have consecutive ones; a rank with fewer than others has stand-ins behind them.
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
    """A position of a loader, between two samples. [Note: position]

    Attributes:
        position: samples consumed by all ranks together.
        epoch, offset: the epoch of the last or the next consumed sample, and how many of its samples are consumed.
        dataset: the `state_dict()` of an iterable dataset at this position; None where it has none.
    """

    position: int = 0
    epoch: int = 0
    offset: int = 0
    dataset: Any = None


@dataclass(frozen=True)
class StepLayout:
    """The division of an order of samples into steps, and of a step into cells. [Note: position]

    Attributes:
        global_batch: the number of samples in a step.
        batch: the largest number of samples in a microbatch.
        ranks: how many ranks share a step.
        total: the number of samples in all epochs together; None where it is unlimited, or known only by reading.
        drop_last: whether a smaller last step is left out.
        whole_batches: whether cells follow from `batch` alone.
    """

    global_batch: int
    batch: int
    ranks: int
    total: int | None
    drop_last: bool
    whole_batches: bool = False

    def at(self, position: int) -> range:
        """The positions of the samples of the step that begins at `position`; empty where there is none."""
        stop = position + self.global_batch
        if self.total is None or stop <= self.total:
            return range(position, stop)
        return range(position, position if self.drop_last else max(position, self.total))

    def left(self, position: int) -> int | None:
        """The number of steps that begin at `position` or later; None where it is unknown."""
        if self.total is None:
            return None
        samples = max(0, self.total - position)
        return samples // self.global_batch if self.drop_last else _ceil(samples, self.global_batch)

    def microbatches(self, samples: int) -> int:
        """The number of microbatches of each rank in a step of `samples` samples."""
        return _ceil(samples, self.ranks * self.batch)

    def cells(self, samples: int) -> int:
        """The number of cells in a step of `samples` samples, except that of stand-ins behind whole batches."""
        return _ceil(samples, self.batch) if self.whole_batches else self.ranks * self.microbatches(samples)

    def first(self, samples: int, rank: int) -> int:
        """The number of the first cell of `rank` among those."""
        return self.cells(samples) * rank // self.ranks

    def shares(self, step: range, ranks: range) -> list[list[range]]:
        """For each of `ranks`, its cells of `step` as positions; the same number for each."""
        each, cells = self.microbatches(len(step)), self.cells(len(step))
        if self.whole_batches:
            borders = [*step[:: self.batch], step.stop]
        else:
            borders = [step.start + _ceil(len(step) * cell, cells) for cell in range(cells + 1)]
        whole = [range(*ends) for ends in pairwise(borders)]
        shares = [whole[self.first(len(step), rank) : self.first(len(step), rank + 1)] for rank in ranks]
        return [[*share, *[range(step.stop, step.stop)] * (each - len(share))] for share in shares]


class SampleOrder:
    """The order of samples of a dataset of known length. [Note: position]"""

    def __init__(self, length: int, *, shuffle: bool, seed: int) -> None:
        self.length = length
        self._shuffle = shuffle
        self._seed = seed
        self._shuffled: tuple[int, Tensor] | None = None  # an epoch and its permutation, 8 bytes per sample

    def ids(self, positions: range) -> tuple[int, ...]:
        """The numbers in the dataset of the samples at `positions`."""
        return tuple(number for part in self._parts(positions) for number in part)

    def place(self, position: int) -> DataPosition:
        """The DataPosition for `position`."""
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
