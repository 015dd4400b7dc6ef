"""Who sends which elements to whom: each needed element once, and nothing else."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from flatfsdp.elastic.holding import KEPT, OWN, SHARDED, Entry, Facts, Holding
from flatfsdp.elastic.transfer import assign
from flatfsdp.errors import UsageError

pytestmark = pytest.mark.unit

SIZE = 1000


def cut(draw: random.Random, world: int) -> list[tuple[int, int]]:
    """The interval of each rank, some of them empty."""
    inside = sorted(draw.choices(range(SIZE + 1), k=world - 1))
    return list(zip([0, *inside], [*inside, SIZE], strict=True))


def facts(*found: tuple[str, int, int]) -> Facts:
    made = (Entry("w", state, torch.float32, (SIZE,), None, start, stop - start) for state, start, stop in found)
    return Facts(tuple(made), {}, ())


def want(start: int, numel: int) -> Entry:
    return Entry("w", "", torch.float32, (SIZE,), None, start, numel)


@pytest.mark.parametrize("seed", range(20))
def test_each_element_comes_once_and_from_its_own_rank_where_that_has_it(seed: int) -> None:
    draw = random.Random(seed)
    old, new = cut(draw, draw.randint(1, 5)), cut(draw, draw.randint(1, 5))
    copies = draw.randint(1, 2)
    brought = [(facts(("", *span), ("exp_avg", *span)),) for span in old * copies]
    world = max(len(brought), len(new))
    brought += [()] * (world - len(brought))
    wanted = [[want(start, stop - start)] if stop > start else [] for start, stop in new]
    wanted += [[]] * (world - len(wanted))
    stepped = [frozenset("w")] * world
    moves = assign(brought, wanted, stepped)
    arrived = Counter(
        (move.receiver, move.entry.state, at) for move in moves for at in range(move.start, move.start + move.numel)
    )
    expected = {
        (rank, state, at)
        for rank, (start, stop) in enumerate(new)
        for state in ("", "exp_avg")
        for at in range(start, stop)
    }
    assert arrived == Counter(expected)
    mine = {(rank, at) for rank, (start, stop) in enumerate(old * copies) for at in range(start, stop)}
    between = [move for move in moves if move.sender != move.receiver]
    lacking = sum((rank, at) not in mine for rank, state, at in expected)
    assert sum(move.nbytes for move in between) == 4 * lacking
    for move in moves:
        assert move.entry.start <= move.start and move.start + move.numel <= move.entry.stop


def test_replicas_share_what_is_sent() -> None:
    brought = [(facts(("", 0, SIZE)),) for _ in range(3)] + [()]
    moves = assign(brought, [[], [], [], [want(0, SIZE)]], [frozenset[str]()] * 4)
    assert [(move.sender, move.numel) for move in moves] == [(0, SIZE)]


def test_own_tensors_come_from_one_rank() -> None:
    entry = Entry("seen", "", torch.float64, (3,), None, 0, 3, OWN)
    brought = [(), (Facts((entry,), {}, ()),), (Facts((entry,), {}, ()),)]
    wants = [[entry]] * 3
    moves = assign(brought, wants, [frozenset[str]()] * 3)
    assert [(move.sender, move.receiver) for move in moves] == [(1, 0), (1, 1), (2, 2)]


def test_states_of_other_shapes_go_to_all_ranks() -> None:
    halves = [Entry("w", "scales", torch.float32, (8,), None, at, 4, KEPT) for at in (0, 4)]
    brought = [
        (Facts((*facts(("", *span)).entries, half), {}, ()),)
        for span, half in zip([(0, 500), (500, SIZE)], halves, strict=True)
    ]
    wants = [[want(0, 500)], [want(500, 500)]]
    moves = [move for move in assign(brought, wants, [frozenset("w")] * 2) if move.entry.state]
    assert [(move.sender, move.receiver, move.start, move.numel) for move in moves] == [
        (0, 0, 0, 4),
        (1, 0, 4, 4),
        (0, 1, 0, 4),
        (1, 1, 4, 4),
    ]


def test_elements_that_nobody_has_are_named() -> None:
    wants = [[want(0, SIZE)]]
    with pytest.raises(UsageError, match=r"element 400 of 'w', of shape \(1000,\), is on no rank"):
        assign([(facts(("", 0, 400), ("", 500, SIZE)),)], wants, [frozenset[str]()])
    with pytest.raises(UsageError, match="no rank has the values of 'w', which rank 0 needs"):
        assign([()], wants, [frozenset[str]()])
    with pytest.raises(UsageError, match=r"'w' has shape \(10, 100\) on rank 0, and shape \(1000,\) on another one"):
        assign([(facts(("", 0, SIZE)),)], [[want(0, SIZE)._replace(shape=(10, 100))]], [frozenset[str]()])


def test_a_part_of_a_block_is_a_holding_of_its_elements() -> None:
    tensors = [torch.arange(100.0), torch.arange(7, dtype=torch.uint8), torch.arange(50, dtype=torch.float64)]
    entries = tuple(
        Entry(name, "", each.dtype, (1000,), None, 10, each.numel(), SHARDED)
        for name, each in zip("abc", tensors, strict=True)
    )
    known = Facts(entries, {}, ())
    assert known.offsets == [0, 448, 512, 960]  # 400, 7 and 400 bytes
    block = torch.zeros(known.offsets[-1], dtype=torch.uint8)
    for each, offset in zip(tensors, known.offsets, strict=False):
        block[offset : offset + each.nbytes] = each.view(torch.uint8)
    found: dict[str, list[float]] = {}
    for start in range(0, 960, 192):
        part: Holding = known.part(start, min(960, start + 192), block[start : start + 192])
        for entry, tensor in zip(part.facts.entries, part.tensors, strict=True):
            assert entry.start == 10 + len(found.setdefault(entry.name, [])) and entry.numel == tensor.numel()
            found[entry.name] += tensor.tolist()
    assert found == {name: each.tolist() for name, each in zip("abc", tensors, strict=True)}
