"""Parity: any one block of a group comes back from what the others keep, at the costs of the formulas."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from flatfsdp.elastic.parity import ALIGNMENT, kept, parity_groups
from flatfsdp.engine.layout.layout import Span
from flatfsdp.errors import ConfigValueError, InternalError

pytestmark = pytest.mark.unit


def xor(pieces: Sequence[bytes], size: int) -> bytes:
    """The exclusive or of `pieces`, as if zeros followed, cut to `size` bytes: byte by byte."""
    total = bytearray(size)
    for piece in pieces:
        for place, byte in enumerate(piece[:size]):
            total[place] ^= byte
    return bytes(total)


def size_at(sizes: Sequence[int], keeper: int) -> int:
    """The bytes of the parity of a member."""
    return max(kept(sizes, member, keeper).numel for member in range(len(sizes)) if member != keeper)


def random_blocks(rng: random.Random, members: int) -> list[bytes]:
    return [rng.randbytes(rng.choice((0, 1, 63, 64, 65, rng.randrange(2000)))) for _ in range(members)]


@pytest.mark.parametrize("seed", range(40))
def test_any_lost_block_is_rebuilt_from_what_the_others_have(seed: int) -> None:
    rng = random.Random(seed)
    blocks = random_blocks(rng, rng.randrange(2, 9))
    members = range(len(blocks))
    sizes = [*map(len, blocks)]

    def part(member: int, span: Span) -> bytes:
        return blocks[member][span.slice]

    parities = [
        xor([part(each, kept(sizes, each, keeper)) for each in members if each != keeper], size_at(sizes, keeper))
        for keeper in members
    ]
    for lost in members:
        rebuilt = bytearray(len(blocks[lost]))
        seen = 0
        for keeper, own in [(keeper, kept(sizes, lost, keeper)) for keeper in members if keeper != lost]:
            others = [part(each, kept(sizes, each, keeper)) for each in members if each not in (lost, keeper)]
            rebuilt[own.slice] = xor([parities[keeper], *others], own.numel)
            seen += own.numel
        assert rebuilt == blocks[lost]
        assert seen == len(blocks[lost])  # each byte once


@pytest.mark.parametrize("seed", range(40))
def test_no_member_keeps_bytes_of_its_own_block_and_each_byte_is_kept_once(seed: int) -> None:
    rng = random.Random(seed)
    sizes = tuple(map(len, random_blocks(rng, rng.randrange(2, 9))))
    for member, size in enumerate(sizes):
        spans = [kept(sizes, member, keeper) for keeper in range(len(sizes)) if keeper != member]
        spans.sort(key=lambda each: (each.start, each.stop))
        assert [spans[0].start, *(each.stop for each in spans)] == [*(each.start for each in spans), size]
        assert all(each.start % ALIGNMENT == 0 or each.is_empty for each in spans)
        with pytest.raises(InternalError):
            kept(sizes, member, member)


@pytest.mark.parametrize("members", [2, 3, 4, 8, 16, 1024])
@pytest.mark.parametrize("size", [0, 1, 4096, 10**9])
def test_memory_and_traffic_are_those_of_the_formulas(members: int, size: int) -> None:
    sizes = (size,) * members
    limit = size / (members - 1) + ALIGNMENT
    for member in {0, 1, members // 2, members - 1}:
        assert size_at(sizes, member) <= limit
        others = [other for other in range(members) if other != member]
        assert sum(kept(sizes, member, keeper).numel for keeper in others) == size  # which it sends
        assert sum(kept(sizes, other, member).numel for other in others) <= size + members * ALIGNMENT  # and receives


@pytest.mark.parametrize("world", [*range(1, 40), 64, 100, 1000, 1024])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_groups_have_each_rank_once_and_about_the_wanted_size(world: int, size: int) -> None:
    groups = parity_groups(range(world), size)
    assert sorted(rank for group in groups for rank in group) == ([] if world == 1 else list(range(world)))
    for group in groups:
        assert min(size, world) <= len(group) < 2 * size


@pytest.mark.parametrize(("nodes", "on_each", "size"), [(2, 4, 4), (4, 8, 4), (128, 8, 8), (3, 5, 3), (8, 8, 4)])
def test_members_of_a_group_are_on_different_machines(nodes: int, on_each: int, size: int) -> None:
    machine = [rank // on_each for rank in range(nodes * on_each)]
    groups = parity_groups(machine, size)
    assert sorted(rank for group in groups for rank in group) == list(range(len(machine)))
    for group in groups:
        assert len({machine[rank] for rank in group}) == len(group) >= min(size, nodes)


def test_ranks_of_one_machine_need_no_group() -> None:
    assert parity_groups((0, 0, 0, 0), 2) == ()


def test_a_group_has_two_ranks_at_least() -> None:
    with pytest.raises(ConfigValueError, match="parity groups: got 1 ranks"):
        parity_groups((0, 1, 2, 3), 1)
