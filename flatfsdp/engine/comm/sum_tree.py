"""The order in which the gradients of microbatches are added: a binary tree over their indices, which knows no ranks.

[Note: tree of microbatches] A sum of floating-point numbers depends on its order. So the sum over microbatches 0 to
n - 1 is defined by the tree over the next power of two whose leaves from n on are left out: whichever rank adds a part
of it, each node is the same two numbers added once, and the result has the same bits. A *block* is a node: the sum of
2^l consecutive microbatches from a multiple of 2^l on, or of those among them that exist. Blocks that cannot be merged
on one rank travel as they are. Each node is rounded once, so the error grows with the logarithm of n.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch

Block = tuple[int, int]  # level and position: the microbatches from position << level on
Addition = tuple[Block, Block, Block]  # a sum, and its halves


@dataclass(frozen=True)
class SumTree:
    """The tree over `leaves` microbatches, at least one.

    A node whose right half is empty is its left half: blocks have their lowest level.
    """

    leaves: int

    def _lowest(self, level: int, position: int) -> Block:
        while level and (2 * position + 1) << level - 1 >= self.leaves:
            level, position = level - 1, 2 * position
        return level, position

    def halves(self, block: Block) -> tuple[Block, Block]:
        """The two blocks whose sum it is. Precondition: it has more than one microbatch."""
        level, position = block
        return (level - 1, 2 * position), self._lowest(level - 1, 2 * position + 1)

    def parent(self, block: Block) -> Block | None:
        """The sum of which it is a half; None for the sum of all."""
        level, position = block
        while 1 << level < self.leaves:
            level, position = level + 1, position // 2
            if (found := self._lowest(level, position)) != block:
                return found
        return None

    def blocks_of(self, microbatches: Iterable[int]) -> tuple[Block, ...]:
        """The fewest blocks with these microbatches; in order."""
        return merged(self, tuple((0, index) for index in microbatches))[0]


@lru_cache(maxsize=256)  # the same for all units, and mostly in all steps
def merged(tree: SumTree, blocks: tuple[Block, ...]) -> tuple[tuple[Block, ...], tuple[Addition, ...]]:
    """The fewest blocks that are the sum of these, which have no microbatch in common, in order; and the additions that
    lead there."""
    found, additions = set[Block](), list[Addition]()
    for block in sorted(blocks, key=_first):
        while (parent := tree.parent(block)) is not None and not found.isdisjoint(halves := tree.halves(parent)):
            found.difference_update(halves)
            additions.append((parent, *halves))
            block = parent
        found.add(block)
    return tuple(sorted(found, key=_first)), tuple(additions)


def _first(block: Block) -> int:
    """Its first microbatch."""
    return block[1] << block[0]


@dataclass(frozen=True)
class BlockExchange:
    """One exchange of blocks over an axis, in which each rank gets its piece of all of them.

    Attributes:
        of_ranks: the blocks that each rank sends; kept: those of which every rank has its piece from earlier ones.
        results, additions: the blocks that they are merged to, and how.
    """

    of_ranks: tuple[tuple[Block, ...], ...]
    kept: tuple[Block, ...]
    results: tuple[Block, ...]
    additions: tuple[Addition, ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def of(tree: SumTree, added: tuple[frozenset[int], ...], before: frozenset[int]) -> BlockExchange:
        """The exchange of the microbatches that each rank has added, where pieces of those `before` are kept."""
        sent, kept = tuple(map(tree.blocks_of, added)), tree.blocks_of(before)
        return BlockExchange(sent, kept, *merged(tree, (*chain(*sent), *kept)))

    @property
    def most(self) -> int:
        """The most blocks of a rank."""
        return max(map(len, self.of_ranks))

    def add_up(self, terms: Mapping[Block, torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Write the results to `outputs`. A single one may be one of `terms`: no other is written to."""
        found, into = dict(terms), dict(zip(self.results, outputs, strict=True))
        for block, left, right in self.additions:
            found[block] = torch.add(found.pop(left), found.pop(right), out=into.get(block))
        for block, output in into.items():
            if found[block].data_ptr() != output.data_ptr():
                output.copy_(found[block])
