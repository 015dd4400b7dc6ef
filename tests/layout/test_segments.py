"""Layouts of several segments, against painting every cell, and rows of parameters against torch's `chunk`."""

from __future__ import annotations

import itertools
import pickle
import random
from dataclasses import dataclass
from math import prod

import pytest
import torch

from flatfsdp.engine.features.post_forward import layout_over
from flatfsdp.engine.layout.layout import FlatLayout, Owned, ParamSpec, Segment, Span
from flatfsdp.engine.planning.rows import pack_rows
from flatfsdp.engine.state.boxes import boxes_of
from flatfsdp.errors import ConfigValueError, InternalError

pytestmark = pytest.mark.unit

Cell = tuple[int, int] | None  # (parameter, element of it), None for padding


@dataclass
class Painting:
    """Every cell of the flat space, and where its segments lie: the layout rule written once more, cell by cell."""

    cells: list[Cell]
    segments: list[tuple[int, int]]

    def shard(self, world: int, rank: int) -> list[Cell]:
        found: list[Cell] = []
        for start, stop in self.segments:
            piece = (stop - start) // world
            found += self.cells[start + rank * piece : start + (rank + 1) * piece]
        return found

    def owned(self, world: int, rank: int) -> list[Owned]:
        shard = self.shard(world, rank)
        found: list[Owned] = []
        for index in sorted({cell[0] for cell in shard if cell}):
            places = [(place, cell[1]) for place, cell in enumerate(shard) if cell and cell[0] == index]
            (first, first_element), (last, last_element) = places[0], places[-1]
            assert len(places) == last + 1 - first == last_element + 1 - first_element
            found.append(Owned(index, Span(first_element, last_element + 1), Span(first, last + 1)))
        return found


def random_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice([0, 1, 1, 2, 3, 4, 5, 9]) for _ in range(rng.randrange(4)))


def random_params(rng: random.Random) -> list[ParamSpec]:
    params = []
    for index in range(rng.randrange(7)):
        shape = random_shape(rng)
        order = rng.sample(range(len(shape)), len(shape)) if rng.random() < 0.3 else range(len(shape))
        params.append(ParamSpec(f"p{index}", shape, stride_of(shape, order)))
    return params


def stride_of(shape: tuple[int, ...], order: range | list[int]) -> tuple[int, ...]:
    """Dense, with the dimensions in this order from the slowest to the fastest."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def paint_rows(params: list[ParamSpec], world: int, align: int) -> Painting:
    cells: list[Cell] = []
    segments = []
    for index, param in enumerate(params):
        cells += [None] * (-len(cells) % align)
        start = len(cells)
        cells += [(index, element) for element in range(param.numel)]
        row = param.numel // param.rows if param.rows else 0
        while row and (len(cells) - start) % (world * row):
            cells.append(None)
        segments.append((start, len(cells)))
    return Painting(cells, segments)


def check(layout: FlatLayout, painting: Painting) -> None:
    """Require that `layout` is the painted one."""
    world = layout.world
    assert layout.padded_numel == len(painting.cells)
    assert [(each.span.start, each.span.stop) for each in layout.segments] == painting.segments
    for index, span in enumerate(layout.spans):
        assert painting.cells[span.slice] == [(index, element) for element in range(span.numel)]
    assert {cell for gap in layout.gaps for cell in range(gap.start, gap.stop)} == {
        place for place, cell in enumerate(painting.cells) if cell is None
    }
    for rank in range(world):
        shard = painting.shard(world, rank)
        assert len(shard) == layout.shard_numel
        assert [cell for piece in layout.pieces(rank) for cell in painting.cells[piece.slice]] == shard
        assert [piece.numel for piece in layout.pieces(rank)] == [piece.numel for piece in layout.pieces_in_shard]
        owned = painting.owned(world, rank)
        assert list(layout.owned(rank)) == owned
        by_index = {part.index: part for part in owned}
        for index in range(len(layout.params)):
            in_shard, in_param = layout.span_in_shard(index, rank), layout.span_in_param(index, rank)
            assert 0 <= in_shard.start <= in_shard.stop <= layout.shard_numel
            if index in by_index:
                assert (in_param, in_shard) == (by_index[index].in_param, by_index[index].in_shard)
            else:
                assert in_shard.is_empty and in_param == Span(0, 0)


@pytest.mark.parametrize("world", range(1, 8))
def test_rows_equal_painting(world: int) -> None:
    rng = random.Random(world)
    for _ in range(60):
        params, align = random_params(rng), rng.choice([1, 1, 2, 4, 8])
        layout = pack_rows(params, world=world, align=align)
        if world == 1 or not params:  # has all rows of everything
            assert layout == FlatLayout.pack(params, world=world, align=align, pad_total=True)
            continue
        check(layout, paint_rows(params, world, align))
        for rank in range(world):
            for index, param in enumerate(params):
                row = param.numel // param.rows if param.rows else 0
                span = layout.span_in_param(index, rank)
                assert not row or (span.start % row, span.numel % row) == (0, 0)


@pytest.mark.parametrize("world", range(1, 8))
def test_segments_of_any_grain_equal_painting(world: int) -> None:
    rng = random.Random(100 + world)
    for _ in range(60):
        layout, painting = random_segments(rng, world)
        check(layout, painting)


def random_segments(rng: random.Random, world: int) -> tuple[FlatLayout, Painting]:
    """Segments of several parameters each, whose pieces are multiples of some grain."""
    align = rng.choice([1, 2, 4])
    params: list[ParamSpec] = []
    spans: list[Span] = []
    segments: list[Segment] = []
    painting = Painting([], [])
    cells = painting.cells
    for _ in range(rng.randrange(1, 5)):
        cells += [None] * rng.choice([0, 0, 1, 3])
        start, first = len(cells), len(params)
        for _ in range(rng.randrange(4)):
            cells += [None] * (-len(cells) % align)
            param = ParamSpec(f"p{len(params)}", random_shape(rng))
            spans.append(Span(len(cells), len(cells) + param.numel))
            cells += [(len(params), element) for element in range(param.numel)]
            params.append(param)
        grain = rng.choice([1, 1, 2, 5, 12])
        cells += [None] * (-(len(cells) - start) % (world * grain))
        segments.append(Segment(Span(start, len(cells)), Span(first, len(params))))
        painting.segments.append((start, len(cells)))
    shard_numel = sum(stop - start for start, stop in painting.segments) // world
    return FlatLayout(tuple(params), tuple(spans), world, len(cells), shard_numel, align, tuple(segments)), painting


@pytest.mark.parametrize("seed", range(4))
def test_fewer_ranks_have_pieces_in_a_row(seed: int) -> None:
    rng = random.Random(seed)
    for world, fewer in ((2, 1), (4, 2), (6, 3), (6, 2), (6, 1), (7, 7)):
        for _ in range(5):
            params, align = random_params(rng), rng.choice([1, 4])
            if params:
                layout = pack_rows(params, world=world, align=align)
                over = layout_over(layout, fewer)
                assert over.padded_numel == layout.padded_numel and over.spans == layout.spans
                check(over, paint_rows(params, world, align))
                for rank in range(fewer):
                    each = world // fewer
                    first, last = layout.pieces(rank * each), layout.pieces((rank + 1) * each - 1)
                    assert over.pieces(rank) == tuple(
                        Span(one.start, other.stop) for one, other in zip(first, last, strict=True)
                    )
            else:
                with pytest.raises(ConfigValueError, match="a divisor of the"):
                    layout_over(pack_rows(params, world=world), world + 1)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", range(1, 8))
@pytest.mark.parametrize("dim", range(3))
def test_rows_are_what_chunk_gives_along_the_slowest_dimension(world: int, dim: int) -> None:
    for sizes in itertools.product((1, 2, 5), (1, 3), (4, 7)):
        shape = sizes[dim:] + sizes[:dim]
        order = [dim, *(each for each in range(3) if each != dim)]
        spec = ParamSpec("p", shape, stride_of(shape, order))
        assert shape[dim] == spec.rows or 1 in shape
        if shape[dim] != spec.rows:
            continue
        layout = pack_rows([spec], world=world)
        whole = torch.arange(spec.numel).as_strided(shape, spec.stride or stride_of(shape, order))
        chunks = whole.chunk(world, dim)
        for rank in range(world):
            boxes = boxes_of(spec, layout.span_in_param(0, rank))
            if rank >= len(chunks):
                assert boxes == ()
                continue
            (box,) = boxes
            assert box.sizes == chunks[rank].shape
            assert box.offsets[dim] == sum(each.shape[dim] for each in chunks[:rank])


def test_a_dimension_of_size_one_inside_another_is_not_the_slowest() -> None:
    column = torch.empty(8, 1)
    assert ParamSpec("p", (1, 8), (8, 1)).rows == 1  # a row
    assert ParamSpec("p", (1, 8), column.t().stride()).rows == 8
    assert ParamSpec("p", (8, 1), (1, 1)).rows == 8
    image = torch.empty(6, 4, 1, 1).to(memory_format=torch.channels_last)
    assert ParamSpec("p", (6, 4, 1, 1), image.stride()).rows == 6


def test_pieces_of_parameters_lie_apart_even_where_they_are_empty() -> None:
    layout = pack_rows([ParamSpec("p", (2, 3)), ParamSpec("q", (1,)), ParamSpec("r", ())], world=4)
    for rank in range(4):
        starts = [layout.span_in_shard(index, rank).start for index in range(3)]
        assert starts == [0, 3, 4]
    assert [each.index for each in layout.owned(3)] == []


def test_a_shard_of_several_segments_is_no_span() -> None:
    layout = pack_rows([ParamSpec("p", (2, 3)), ParamSpec("q", (1,))], world=2)
    with pytest.raises(InternalError, match="a shard of 2 segments is not a single span of the flat space"):
        layout.shard(0)
    one = pack_rows([ParamSpec("p", (3, 3))], world=2)
    assert one.shard(1) == Span(6, 12)
    with pytest.raises(ConfigValueError, match="expected a rank from 0 to 1, found 2"):
        layout.pieces(2)
    with pytest.raises(ConfigValueError, match="expected world and align of at least 1"):
        pack_rows([], world=0)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(0, 7, 0, 1), (8, 14, 1, 2)], r"2 ranks cannot split the segment \[0, 7\) evenly"),
        ([(0, 8, 0, 1), (6, 14, 1, 2)], r"the segment \[6, 14\) overlaps the previous one, which ends at 8"),
        ([(0, 8, 0, 1), (10, 16, 1, 2)], r"'p1' at \[8, 11\) lies outside of its segment \[10, 16\)"),
        ([(0, 8, 0, 2), (8, 14, 2, 2)], r"'p1' at \[8, 11\) lies outside of its segment \[0, 8\)"),
        ([(0, 8, 0, 1), (8, 14, 0, 2)], r"parameters \[0, 2\) are in the segment after that of 0"),
        ([(0, 8, 0, 1), (8, 14, 1, 1)], "the segments hold 1 of 2 parameters"),
        ([(0, 8, 0, 1), (8, 16, 1, 2)], "pieces of 8 elements do not make a shard of 7"),
    ],
)
def test_a_wrong_layout_cannot_be_made(segments: list[tuple[int, int, int, int]], message: str) -> None:
    def made(segments: list[tuple[int, int, int, int]]) -> FlatLayout:
        found = [Segment(Span(start, stop), Span(first, last)) for start, stop, first, last in segments]
        params = (ParamSpec("p0", (6,)), ParamSpec("p1", (3,)))
        return FlatLayout(params, (Span(0, 6), Span(8, 11)), 2, 14, 7, 4, tuple(found))

    made([(0, 8, 0, 1), (8, 14, 1, 2)])
    with pytest.raises(InternalError, match=message):
        made(segments)


def test_digest_sees_segments_and_pickles_keep_them() -> None:
    params = [ParamSpec("weight", (4, 4)), ParamSpec("bias", (4,))]
    layouts = [pack_rows(params, world=2), FlatLayout.pack(params, world=2, pad_total=True)]
    assert layouts[0].spans == layouts[1].spans and layouts[0].shard_numel == layouts[1].shard_numel
    assert layouts[0].digest() != layouts[1].digest()
    for layout in layouts:
        assert pickle.loads(pickle.dumps(layout)) == layout
    # Stamps of optimizers and state dicts of local shards hold this.
    known = FlatLayout.pack([ParamSpec("weight", (2, 6)), ParamSpec("bias", (3,))], world=2, align=4)
    assert known.digest() == "c9055140ce5b4dbd3c20ceaeb87524c800e14418e24f61df87cf1ef8851f239f"


def test_every_element_has_one_rank_whatever_the_world() -> None:
    shapes: list[tuple[int, ...]] = [(8192, 8192), (1024, 8192), (28672, 8192), (8192,), (), (3, 7)]
    params = [ParamSpec(f"p{index}", shape) for index, shape in enumerate(shapes)]
    for world in (64, 384, 1024):
        layout = pack_rows(params, world=world, align=8)
        for index, shape in enumerate(shapes):
            assert sum(layout.span_in_param(index, rank).numel for rank in range(world)) == prod(shape)
