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

import torch

Block = tuple[int, int]  # level and position: the microbatches from position << level on


@dataclass(frozen=True)
class SumTree:
    """The tree over `leaves` microbatches, at least one.

    A node whose right half is empty is its left half: blocks have their lowest level.
    """

    leaves: int

    @property
    def root(self) -> Block:
        """The sum of all."""
        return self._lowest((self.leaves - 1).bit_length(), 0)

    def _lowest(self, level: int, position: int) -> Block:
        while level and (2 * position + 1) << level - 1 >= self.leaves:
            level, position = level - 1, 2 * position
        return level, position

    def halves(self, block: Block) -> tuple[Block, Block]:
        """The two blocks whose sum it is. Precondition: it has more than one microbatch."""
        level, position = block
        return (level - 1, 2 * position), self._lowest(level - 1, 2 * position + 1)

    def parent(self, block: Block) -> Block | None:
        """The sum of which it is a half; None for the root."""
        level, position = block
        while block != self.root:
            level, position = level + 1, position // 2
            if (found := self._lowest(level, position)) != block:
                return found
        return None

    def merged(self, blocks: Iterable[Block]) -> list[Block]:
        """The fewest blocks that are the sum of these, which have no microbatch in common; in order."""
        found, left = set[Block](), [*blocks]
        while left:
            block = left.pop()
            parent = self.parent(block)
            other = next((half for half in self.halves(parent) if half != block), None) if parent is not None else None
            if parent is None or other not in found:
                found.add(block)
            else:
                found.remove(other)
                left.append(parent)
        return sorted(found, key=lambda block: block[1] << block[0])

    def blocks_of(self, microbatches: Iterable[int]) -> tuple[Block, ...]:
        """The fewest blocks with these microbatches; in order."""
        return tuple(self.merged((0, index) for index in microbatches))

    def add_up(self, block: Block, terms: Mapping[Block, torch.Tensor], output: torch.Tensor) -> None:
        """Write the sum of those of `terms` that are parts of `block`, and all of it, to `output`, which may be one of
        them: no other is written to."""
        total = terms.get(block)
        if total is None:
            is_term = any(term.data_ptr() == output.data_ptr() for term in terms.values())
            into = (
                torch.empty_like(output) if is_term and len(terms) > 2 else output
            )  # two are read as they are written
            total = self._sum(block, terms, into)
        if total.data_ptr() != output.data_ptr():
            output.copy_(total)

    def _sum(self, block: Block, terms: Mapping[Block, torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        """The sum of `block`: a term, or in `output`."""
        if (term := terms.get(block)) is not None:
            return term
        left, right = self.halves(block)
        one = self._sum(left, terms, output)
        other = self._sum(right, terms, torch.empty_like(output) if one is output and right not in terms else output)
        return torch.add(one, other, out=output)


@dataclass(frozen=True)
class BlockExchange:
    """One exchange of blocks over an axis, in which each rank gets its piece of all of them.

    Attributes:
        of_ranks: the blocks that each rank sends; kept: those of which every rank has its piece from earlier ones.
        results: the blocks that they are merged to.
    """

    tree: SumTree
    of_ranks: tuple[tuple[Block, ...], ...]
    kept: tuple[Block, ...]
    results: tuple[Block, ...]

    @staticmethod
    @lru_cache(maxsize=256)  # the same for all units, and mostly in all steps
    def of(tree: SumTree, added: tuple[frozenset[int], ...], before: frozenset[int]) -> BlockExchange:
        """The exchange of the microbatches that each rank has added, where pieces of those `before` are kept."""
        sent, kept = tuple(map(tree.blocks_of, added)), tree.blocks_of(before)
        return BlockExchange(tree, sent, kept, tree.blocks_of(before.union(*added)))

    @property
    def most(self) -> int:
        """The most blocks of a rank."""
        return max(map(len, self.of_ranks))

    def add_up(self, terms: Mapping[Block, torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Write the results to `outputs`."""
        for block, output in zip(self.results, outputs, strict=True):
            self.tree.add_up(block, terms, output)
