"""The tree over microbatches: any ranks that hold them, in any blocks, get the sum of one process, bit by bit."""

from __future__ import annotations

import random

import pytest
import torch

from flatfsdp.engine.comm.sum_tree import Block, BlockExchange, SumTree, merged

pytestmark = pytest.mark.unit


def by_definition(leaves: list[torch.Tensor]) -> torch.Tensor:
    """The sum, level by level: neighbors are added, the last one of an odd number goes up alone."""
    while len(leaves) > 1:
        pairs = [torch.add(*leaves[i : i + 2]) for i in range(0, len(leaves) - 1, 2)]
        leaves = [*pairs, *leaves[2 * len(pairs) :]]
    return leaves[0]


def leaves_of(tree: SumTree, block: Block) -> list[int]:
    """The microbatches of a block."""
    level, position = block
    return [index for half in tree.halves(block) for index in leaves_of(tree, half)] if level else [position]


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 12, 31])
def test_halves_and_parents(count: int) -> None:
    tree, seen = SumTree(count), []
    (root,) = left = [*tree.blocks_of(range(count))]
    assert tree.parent(root) is None
    while left:
        block = left.pop()
        seen.append(block)
        if block[0]:
            halves = tree.halves(block)
            assert [tree.parent(half) for half in halves] == [block, block]
            assert leaves_of(tree, block) == [index for half in halves for index in leaves_of(tree, half)]
            left += halves
    assert len(seen) == 2 * count - 1
    assert leaves_of(tree, root) == [*range(count)]


def test_aligned_ranks_send_one_block() -> None:
    assert SumTree(8).blocks_of([4, 5, 6, 7]) == ((2, 1),)
    assert SumTree(12).blocks_of([8, 11, 9, 10]) == ((2, 2),)
    assert SumTree(12).blocks_of(range(3, 9)) == ((0, 3), (2, 1), (0, 8))
    assert SumTree(5).blocks_of([4]) == ((0, 4),)


@pytest.mark.parametrize("seed", range(60))
def test_any_partition(seed: int) -> None:
    """Ranks merge what they have, in a random order; one merges all that they send, in one of its own blocks."""
    draw = random.Random(seed)
    count, world = draw.randint(1, 40), draw.randint(1, 8)
    torch.manual_seed(seed)
    leaves = [torch.randn(7) * 10.0 ** draw.randint(-20, 20) for _ in range(count)]
    if seed % 5 == 0:
        leaves[draw.randrange(count)][0] = float("nan")
        leaves[draw.randrange(count)][1] = float("inf")
    tree = SumTree(count)
    owners = [draw.randrange(world) for _ in range(count)] if seed % 2 else sorted(draw.choices(range(world), k=count))
    sent: dict[Block, torch.Tensor] = {}
    for rank in range(world):
        own = [index for index, owner in enumerate(owners) if owner == rank]
        draw.shuffle(own)
        held: dict[Block, torch.Tensor] = {}
        for index in own:  # like a binary counter: merged as soon as possible
            held[0, index] = leaves[index].clone()
            for block, left, right in merged(tree, (*held,))[1]:
                held[block] = held.pop(left) + held.pop(right)
        assert sorted(held) == sorted(tree.blocks_of(own))
        sent |= held
    before = {block: term.clone() for block, term in sent.items()}
    target = draw.choice([torch.empty(7), *sent.values()])
    exchange = BlockExchange.of(tree, tuple(frozenset(leaves_of(tree, block)) for block in sent), frozenset())
    assert exchange.results == tree.blocks_of(range(count))
    exchange.add_up(sent, [target])
    assert bits(target) == bits(by_definition(leaves))
    assert all(bits(term) == bits(before[block]) for block, term in sent.items() if term is not target)


def test_zeros_keep_their_sign() -> None:
    exchange, total = BlockExchange.of(SumTree(2), (frozenset({0}), frozenset({1})), frozenset()), torch.empty(2)
    exchange.add_up({(0, 0): torch.tensor([-0.0, 0.0]), (0, 1): torch.tensor([-0.0, -0.0])}, [total])
    assert total.signbit().tolist() == [True, False]
