"""Parts of whole tensors, painted element by element."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from flatfsdp.engine.layout.layout import FlatLayout, ParamSpec, Part, Span
from flatfsdp.engine.parts.part import joined, shard, shown_elsewhere, stored_shape, strided_shard
from flatfsdp.engine.state.boxes import boxes_of_whole, runs_of_whole

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("size", [0, 1, 5, 8, 17])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_chunks_are_torchs(size: int, count: int) -> None:
    whole = ((0, size),) if size else ()
    expected = [piece.tolist() for piece in torch.arange(size).chunk(count)]
    expected += [[]] * (count - len(expected))
    found = [[i for first, n in shard(whole, count, place) for i in range(first, first + n)] for place in range(count)]
    assert found == ([[]] * count if not size else expected)


@pytest.mark.parametrize("size", [4, 7, 12, 13])
@pytest.mark.parametrize(("count", "factor"), [(2, 2), (3, 2), (2, 3)])
def test_strided_chunks_divide_each_chunk_again(size: int, count: int, factor: int) -> None:
    for place in range(count):
        found = [i for first, n in strided_shard(((0, size),), count, place, factor) for i in range(first, first + n)]
        outer = torch.arange(size).chunk(factor)
        inner = [list(each.chunk(count)) for each in outer]
        assert found == [i for each in inner if place < len(each) for i in each[place].tolist()]


@pytest.mark.parametrize(("count", "factor"), [*itertools.product((1, 2, 3, 4, 6), (2, 3, 4))])
def test_sizes_of_which_placements_tell_another_split_are_found(count: int, factor: int) -> None:
    """By the part that torch's distributed checkpoint computes for a rank."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = _StridedShard(0, split_factor=factor), Shard(0)
    for size in range(1, 31):
        wrong = []
        for place in itertools.product(range(count), range(factor)):
            got = _compute_local_shape_and_global_offset((size,), (count, factor), list(place), placements)
            held = shard(shard(((0, size),), factor, place[1]), count, place[0])
            if got[0] != (sum(n for _, n in held),) or (held and got[1] != (held[0][0],)):
                wrong.append(place)
        found = shown_elsewhere(size, ((count, factor), (factor, None)), 0)
        assert found == (wrong[0] if wrong else None), size
        assert not (count < 3 and wrong), size


def some_part(seed: int) -> tuple[ParamSpec, torch.Tensor]:
    """A part of a random whole, whose elements are numbered, and those that it has."""
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3)))
    ranges = []
    for size in shape:
        kept = sorted(rng.sample(range(size), rng.randint(1, size)))
        ranges.append(joined((i, 1) for i in kept))
    part = Part(shape, None, tuple(ranges))
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    for dim, each in enumerate(ranges):
        values = values.index_select(dim, torch.tensor([i for first, n in each for i in range(first, first + n)]))
    assert stored_shape(part) == tuple(values.shape)
    return ParamSpec("w", stored_shape(part), None, part), values.contiguous().view(-1)


@pytest.mark.parametrize("seed", range(40))
def test_intervals_of_parts_are_boxes_and_runs_of_the_whole(seed: int) -> None:
    spec, values = some_part(seed)
    whole = torch.arange(spec.whole.numel).view(spec.whole.shape)
    for start, stop in itertools.combinations(range(spec.numel + 1), 2):
        expected = values[start:stop].tolist()
        painted: list[int] = []
        for box in boxes_of_whole(spec, Span(start, stop)):
            block = whole
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                block = block.narrow(dim, offset, size)
            painted += block.flatten().tolist()
        assert sorted(painted) == sorted(expected)
        run_values: list[int] = []
        for own, there in runs_of_whole(spec, Span(start, stop)):
            assert own.numel == there.numel and values[own.slice].tolist() == list(range(there.start, there.stop))
            run_values += range(there.start, there.stop)
        assert run_values == expected or sorted(run_values) == sorted(expected)


def test_digests_of_layouts_with_parts_are_those_in_existing_files() -> None:
    part = Part((4, 6), None, (((0, 2),), ((0, 1), (3, 2))))
    layout = FlatLayout.pack([ParamSpec("weight", (2, 3), None, part)], world=2, align=4)
    assert layout.digest() == "82036ca39bf9efc67f224e1c1f67ca476994d0225355844f32575246390bf9ce"
