"""One rank's part in the sums of blocks of microbatches over ranks. [Note: tree of microbatches]"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..comm.sum_tree import Block, BlockExchange
from .pieces import RankPieces


@dataclass(frozen=True, eq=False)
class RankBlocks:
    """One rank's blocks, of which each rank gets the sums of its own pieces.

    Attributes:
        exchange: the blocks of all ranks, and what they are merged to.
        rank: this rank in its group.
        blocks: of each block of this rank the pieces of all ranks, which have `sizes` elements.
        kept: this rank's pieces of blocks that were exchanged before.
        outputs: for the results, 1-D, at least one. A single one may be this rank's piece of its last block.
        share: the pieces of all ranks of a tensor in which the last output is this rank's, if the others are to be
            filled, too.
    """

    exchange: BlockExchange
    rank: int
    blocks: Sequence[Sequence[RankPieces]]
    kept: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    sizes: Sequence[int]
    share: Sequence[torch.Tensor] = ()

    def add_up(self, arrived: Mapping[Block, torch.Tensor], start: int, end: int) -> None:
        """Write the sums of the elements from `start` to `end`, given those of other ranks' blocks, to `outputs`."""
        terms = dict(arrived)
        own = [of_ranks[self.rank].contiguous(start, end) for of_ranks in self.blocks]
        terms |= zip(self.exchange.of_ranks[self.rank], own, strict=True)
        terms |= zip(self.exchange.kept, [each[start:end] for each in self.kept], strict=True)
        self.exchange.add_up(terms, [output[start:end] for output in self.outputs])
