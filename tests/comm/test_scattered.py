"""Rows of many small pieces are copied as they would be one by one, in fewer calls."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
import torch

from flatfsdp.engine.base import _torch
from flatfsdp.engine.transports import pieces as lists
from flatfsdp.engine.transports.pieces import LARGEST, RankPieces, pieces_of_ranks

pytestmark = pytest.mark.unit

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.complex64)


def numbers(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 100, (numel,)).to(dtype)


def random_list(chance: random.Random, world: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors in a few storages, some of them large, some apart, and their sizes even or odd."""
    found = []
    for _ in range(chance.randint(1, 4)):
        odd, gap = chance.choice((1, 4, 16)), chance.choice((0, 4, 5))
        sizes = [world * odd * chance.randint(1, 9) for _ in range(chance.randint(1, 9))]
        if chance.random() < 0.4:
            sizes.insert(chance.randrange(len(sizes) + 1), world * (LARGEST // dtype.itemsize + 16))
        flat = torch.zeros(chance.randint(0, 1) * 4 + sum(sizes) + gap * len(sizes), dtype=dtype)
        end = 0
        for size in sizes:
            found.append(flat[end : end + size])
            end += size + gap
    return found


@pytest.mark.parametrize("seed", range(60))
def test_rows_are_copied_as_piece_by_piece(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    world, dtype = chance.randint(1, 4), chance.choice(DTYPES)
    tensors = random_list(chance, world, dtype)
    rows = pieces_of_ranks(tensors, world)
    memory = numbers(1 + rows[0].numel, dtype)[chance.randint(0, 1) :][: rows[0].numel]  # aligned or not
    for row in rows:
        before = [piece.clone() for other in rows if other is not row for piece in other.pieces]
        row.copy_from(memory, 0)
        assert torch.equal(torch.cat(row.pieces), memory)
        assert all(map(torch.equal, before, [p for other in rows if other is not row for p in other.pieces]))
        copied = torch.zeros(row.numel + 1, dtype=dtype)[chance.randint(0, 1) :][: row.numel]
        row.copy_to(copied, 0)
        assert torch.equal(copied, memory)
        # A part, as a chunk has it.
        start = chance.randrange(row.numel)
        part = torch.zeros(chance.randint(1, row.numel - start), dtype=dtype)
        row.copy_to(part, start)
        assert torch.equal(part, memory[start : start + part.numel()])
        row.copy_from(part.flip(0), start)
        assert torch.equal(torch.cat(row.pieces)[start : start + part.numel()], part.flip(0))


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_filled_from_shards_that_adjoin_or_not(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    tensors = random_list(chance, 2, torch.float32)
    row = pieces_of_ranks(tensors, 2)[1]
    for _ in range(3):
        given = chance.choice((torch.float32, torch.float64))
        flat = numbers(row.numel + 2 * len(row.sizes), given)
        gap, end, shards = chance.choice((0, 0, 2)), chance.choice((0, 4, 1)), []
        for size in row.sizes:
            if chance.random() < 0.05:
                flat = flat.clone()  # from here on in another storage
            shards.append(flat[end : end + size])
            end += size + gap
            if end + 64 > flat.numel() or end + LARGEST > flat.numel():
                flat, end = numbers(row.numel + 2 * len(row.sizes), given), 0
        if any(shard.numel() != size for shard, size in zip(shards, row.sizes, strict=True)):
            shards = [numbers(size, given) for size in row.sizes]
        for _ in range(2):  # the second time from the cache
            row.fill(shards)
            assert all(torch.equal(piece, shard.float()) for piece, shard in zip(row.pieces, shards, strict=True))
            copied = torch.zeros(row.numel + 1)[chance.randint(0, 1) :][: row.numel]  # aligned or not
            row.copy_given_to(copied, 0)
            assert torch.equal(copied, torch.cat(row.pieces))
            row.copy_given_to(copied[1:], 1)
            assert torch.equal(copied, torch.cat(row.pieces))
            shards[0].add_(1)
    row.fill(row.pieces)  # which lie there


def test_many_small_pieces_take_a_call_for_each_storage() -> None:
    flats = [torch.zeros(40 * 16), torch.zeros(40 * 16)]
    row = pieces_of_ranks([each for flat in flats for each in flat.split(16)], 2)[0]
    memory = numbers(row.numel, torch.float32)
    row.copy_from(memory, 0)
    calls = []

    def counted(*args: object, **kwargs: object) -> None:
        calls.append(args)

    shards = list(torch.ones(row.numel).split(row.sizes))
    row.fill(shards)
    with patch.object(_torch, "foreach_copy_", counted), patch.object(lists, "copy", counted):
        row.copy_from(memory, 0)
        row.copy_to(memory, 0)
        row.fill(shards[:40] + shards[40:])
    assert [args for args in calls if args != ([], [])] == []
    assert torch.equal(torch.cat(row.pieces), torch.ones(row.numel))


def test_a_cut_row_is_made_without_its_pieces() -> None:
    like = RankPieces(list(torch.zeros(8).split([3, 5])))
    memory = torch.arange(8.0)
    cut = like.of(memory)
    assert cut.memory is memory and "pieces" not in vars(cut)
    assert [each.tolist() for each in cut.pieces] == [[0, 1, 2], [3, 4, 5, 6, 7]]


def test_what_was_indexed_in_inference_mode_or_for_another_device_serves_training() -> None:
    flat = torch.zeros(64)
    row = pieces_of_ranks(flat.split(16), 2)[0]
    memory = torch.ones(32)
    with torch.inference_mode(), torch.device("meta"):
        row.copy_from(memory, 0)
    assert torch.equal(torch.cat(row.pieces), memory)
    with torch.inference_mode():
        row.copy_from(torch.ones(32), 0)
    row.copy_from(torch.full((32,), 2.0), 0)
    row.fill(list(torch.full((32,), 3.0).split(8)))
    assert torch.cat(row.pieces).tolist() == [3.0] * 32
