"""The address map against two oracles: painting every cell of the flat space, and torch's FSDP1 in the same process."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleShardingStrategy

from flatfsdp.engine.features.post_forward import layout_over
from flatfsdp.engine.layout.layout import FlatLayout, Owned, ParamSpec, Span
from flatfsdp.errors import ConfigValueError, InternalError
from tests.harness.calls import calls_of
from tests.harness.fake import fake_world

pytestmark = pytest.mark.unit

Cell = tuple[int, int] | None  # (parameter, element of it), None for padding


# --- spans and specs --------------------------------------------------------------------------------------------------


def test_span_is_half_open() -> None:
    span = Span(2, 5)
    assert (span.numel, span.is_empty, str(span)) == (3, False, "[2, 5)")
    assert list(range(10))[span.slice] == [2, 3, 4]
    assert span.shift(-2) == Span(0, 3)
    assert Span(4, 4).is_empty


@pytest.mark.parametrize("bounds", [(3, 2), (-1, 2)])
def test_span_refuses_what_is_no_interval(bounds: tuple[int, int]) -> None:
    with pytest.raises(InternalError, match="a span needs 0 <= start <= stop"):
        Span(*bounds)


def test_intersect_agrees_with_sets_and_stays_inside() -> None:
    spans = [Span(start, stop) for start in range(5) for stop in range(start, 6)]
    for one in spans:
        for other in spans:
            both = one.intersect(other)
            assert set(range(both.start, both.stop)) == set(range(one.start, one.stop)) & set(
                range(other.start, other.stop)
            )
            assert one.start <= both.start <= both.stop <= one.stop


def test_disjoint_spans_intersect_at_the_nearest_end() -> None:
    assert Span(10, 20).intersect(Span(0, 5)) == Span(10, 10)
    assert Span(10, 20).intersect(Span(30, 35)) == Span(20, 20)


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((3,), 3), ((2, 0, 4), 0), ((2, 3, 4), 24)])
def test_spec_counts_elements(shape: tuple[int, ...], numel: int) -> None:
    assert ParamSpec("p", shape).numel == numel


def test_spec_keeps_only_strides_that_matter() -> None:
    for tensor in (torch.empty(2, 3), torch.empty(2, 0, 3), torch.empty(()), torch.empty(5, 1, 2)):
        assert ParamSpec("p", tensor.shape, tensor.stride()) == ParamSpec("p", tuple(tensor.shape))


@pytest.mark.parametrize("kernel", [3, 1])
def test_spec_keeps_channels_last(kernel: int) -> None:
    image = torch.empty(2, 3, kernel, kernel).to(memory_format=torch.channels_last)
    spec = ParamSpec("p", image.shape, image.stride())
    assert spec.stride == image.stride()
    view = torch.arange(image.numel()).as_strided(spec.shape, spec.stride)
    assert view.is_contiguous(memory_format=torch.channels_last)
    assert sorted(view.flatten().tolist()) == list(range(image.numel()))


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(4, 6)[:, :3], torch.empty(4, 1).expand(4, 3), torch.empty(6)[::2], torch.empty(3).expand(3, 3)],
    ids=["sliced", "expanded", "stepped", "repeated"],
)
def test_spec_refuses_gaps_and_overlaps(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigValueError, match=r"parameter 'bad': expected its \d+ elements to fill their memory once"):
        ParamSpec("bad", tensor.shape, tensor.stride())


def test_spec_refuses_shapes_that_are_none() -> None:
    with pytest.raises(ConfigValueError, match=r"parameter 'bad': expected sizes of at least 0, found shape \(2, -1\)"):
        ParamSpec("bad", (2, -1))
    with pytest.raises(ConfigValueError, match=r"parameter 'bad': expected one stride per dimension"):
        ParamSpec("bad", (2, 3), (1,))


# --- against painting -------------------------------------------------------------------------------------------------


def paint(shapes: list[tuple[int, ...]], world: int, align: int, pad_total: bool) -> tuple[list[Cell], int]:
    """Every cell of the padded flat space, and the unpadded size: the layout rule written once more, cell by cell."""
    cells: list[Cell] = []
    for index, shape in enumerate(shapes):
        while len(cells) % align:
            cells.append(None)
        cells.extend((index, element) for element in range(prod(shape)))
    while pad_total and len(cells) % world:
        cells.append(None)
    numel = len(cells)
    while len(cells) % world:
        cells.append(None)
    return cells, numel


def owned_by_painting(cells: list[Cell], world: int, rank: int) -> list[Owned]:
    shard_numel = len(cells) // world
    shard = cells[rank * shard_numel : (rank + 1) * shard_numel]
    found: list[Owned] = []
    for index in sorted({cell[0] for cell in shard if cell}):
        places = [(place, cell[1]) for place, cell in enumerate(shard) if cell and cell[0] == index]
        (first, first_element), (last, last_element) = places[0], places[-1]
        assert len(places) == last + 1 - first == last_element + 1 - first_element
        found.append(Owned(index, Span(first_element, last_element + 1), Span(first, last + 1)))
    return found


def random_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice([0, 1, 1, 2, 3, 4, 5]) for _ in range(rng.randrange(4)))


def random_shapes(rng: random.Random) -> list[tuple[int, ...]]:
    return [random_shape(rng) for _ in range(rng.randrange(7))]


def random_packing(rng: random.Random) -> tuple[int, int, bool]:
    return rng.choice([1, 2, 3, 4, 7, 16]), rng.choice([1, 2, 4, 8]), rng.random() < 0.5


def packed(shapes: list[tuple[int, ...]], world: int, align: int, pad_total: bool) -> FlatLayout:
    params = [ParamSpec(f"p{index}", shape) for index, shape in enumerate(shapes)]
    return FlatLayout.pack(params, world=world, align=align, pad_total=pad_total)


@pytest.mark.parametrize("seed", range(20))
def test_layout_equals_painting(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        shapes, (world, align, pad_total) = random_shapes(rng), random_packing(rng)
        layout = packed(shapes, world, align, pad_total)
        cells, numel = paint(shapes, world, align, pad_total)
        assert (layout.numel, layout.padded_numel) == (numel, len(cells))
        assert layout.shard_numel * world == len(cells)
        for index, span in enumerate(layout.spans):
            assert cells[span.slice] == [(index, element) for element in range(span.numel)]
        for rank in range(world):
            assert layout.shard(rank) == Span(rank * layout.shard_numel, (rank + 1) * layout.shard_numel)
            owned = layout.owned(rank)
            assert list(owned) == owned_by_painting(cells, world, rank)
            in_shard = {part.index: part.in_shard for part in owned}
            for index in range(len(shapes)):
                span = layout.span_in_shard(index, rank)
                assert 0 <= span.start <= span.stop <= layout.shard_numel
                assert span == in_shard.get(index, span)
                assert span.is_empty == (index not in in_shard)


@pytest.mark.parametrize("seed", range(10))
def test_fewer_shards_hold_the_same_cells(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        shapes, (_, align, pad_total), world = random_shapes(rng), random_packing(rng), rng.choice([1, 2, 6, 12, 16])
        layout = packed(shapes, world, align, pad_total)
        cells = paint(shapes, world, align, pad_total)[0]
        for fewer in (count for count in range(1, world + 1) if world % count == 0):
            over = layout_over(layout, fewer)
            assert (over.padded_numel, over.spans, over.world) == (len(cells), layout.spans, fewer)
            each = world // fewer  # shards in a row that make one of the fewer
            for rank in range(fewer):
                assert list(over.owned(rank)) == owned_by_painting(cells, fewer, rank)
                assert over.shard(rank) == Span(
                    layout.shard(rank * each).start, layout.shard((rank + 1) * each - 1).stop
                )
        for count in (0, -1, 2 * world, *(count for count in range(1, world) if world % count)):
            with pytest.raises(ConfigValueError, match=f"a divisor of the {world} shards of a layout, found {count}"):
                layout_over(layout, count)


# --- special cases by hand --------------------------------------------------------------------------------------------


def test_scalars_empty_parameters_and_ranks_of_padding_only() -> None:
    layout = packed([(), (0,), (), (0, 3), ()], world=4, align=1, pad_total=False)
    assert (layout.numel, layout.shard_numel, layout.padded_numel) == (3, 1, 4)
    assert [[part.index for part in layout.owned(rank)] for rank in range(4)] == [[0], [2], [4], []]
    assert layout.shard(3) == Span(3, 4)


def test_nothing_but_empty_parameters() -> None:
    for params in ([], [ParamSpec("empty", (0, 2))]):
        layout = FlatLayout.pack(params, world=3, align=4, pad_total=True)
        assert (layout.numel, layout.padded_numel, layout.shard(2), layout.owned(2)) == (0, 0, Span(0, 0), ())


def test_world_of_one_owns_everything() -> None:
    layout = packed([(2, 3), (3,)], world=1, align=4, pad_total=True)
    assert layout.numel == layout.padded_numel == 11
    assert layout.owned(0) == (Owned(0, Span(0, 6), Span(0, 6)), Owned(1, Span(0, 3), Span(8, 11)))


def test_owned_is_computed_once() -> None:
    layout = packed([(5,)], world=2, align=1, pad_total=False)
    assert layout.owned(1) is layout.owned(1)


# --- the proof --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spans": (Span(0, 6), Span(4, 7))}, r"'p1' at \[4, 7\) overlaps the previous parameter, which ends at 6"),
        ({"spans": (Span(4, 10), Span(0, 3))}, r"'p1' at \[0, 3\) overlaps the previous parameter, which ends at 10"),
        ({"spans": (Span(0, 6), Span(7, 10))}, r"'p1' at \[7, 10\) does not start at a multiple of 4"),
        ({"spans": (Span(0, 6), Span(8, 12))}, r"'p1' of 3 elements was given the span \[8, 12\)"),
        ({"spans": (Span(0, 6), Span(12, 15))}, r"'p1' at \[12, 15\) ends beyond the 11 elements of the layout"),
        ({"numel": 10}, r"'p1' at \[8, 11\) ends beyond the 10 elements of the layout"),
        ({"shard_numel": 5}, "2 shards of 5 elements do not hold 11 elements"),
        ({"world": 0}, "needs world >= 1 and align >= 1, found 0 and 4"),
        ({"params": (ParamSpec("p0", (6,)), ParamSpec("p0", (3,)))}, r"occur more than once: \['p0'\]"),
    ],
)
def test_a_wrong_layout_cannot_be_made(changes: dict[str, object], message: str) -> None:
    right: dict[str, object] = {
        "params": (ParamSpec("p0", (6,)), ParamSpec("p1", (3,))),
        "spans": (Span(0, 6), Span(8, 11)),
        "world": 2,
        "numel": 11,
        "shard_numel": 6,
        "align": 4,
    }
    FlatLayout(**right)  # type: ignore[arg-type]
    with pytest.raises(InternalError, match=message):
        FlatLayout(**{**right, **changes})  # type: ignore[arg-type]


def test_arguments_of_calls_are_checked() -> None:
    layout = packed([(5,)], world=2, align=1, pad_total=False)
    for rank in (-1, 2):
        with pytest.raises(ConfigValueError, match=f"expected a rank from 0 to 1, found {rank}"):
            layout.owned(rank)
    for world, align in ((0, 1), (2, 0)):
        with pytest.raises(ConfigValueError, match="expected world and align of at least 1"):
            FlatLayout.pack([], world=world, align=align)


def test_digest_sees_every_difference() -> None:
    weight, bias = ParamSpec("weight", (2, 6)), ParamSpec("bias", (3,))
    layouts = [
        FlatLayout.pack([weight, bias], world=2, align=4),
        FlatLayout.pack([bias, weight], world=2, align=4),
        FlatLayout.pack([weight], world=2, align=4),
        FlatLayout.pack([weight, bias], world=3, align=4),
        FlatLayout.pack([weight, bias], world=2, align=1),
        FlatLayout.pack([weight, bias], world=2, align=4, pad_total=True),
        FlatLayout.pack([ParamSpec("weight", (6, 2)), bias], world=2, align=4),
        FlatLayout.pack([ParamSpec("weight", (2, 6), (1, 2)), bias], world=2, align=4),
        FlatLayout.pack([ParamSpec("w", (2, 6)), bias], world=2, align=4),
    ]
    assert len({layout.digest() for layout in layouts}) == len(layouts)
    assert layouts[0].digest() == FlatLayout.pack([weight, bias], world=2, align=4).digest()
    assert len(layouts[0].digest()) == 64


# --- against torch ----------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Parameters of odd sizes and one in channels_last. FSDP1 takes no 0-dim ones and counts empty ones as owned."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(3, 5, dtype=dtype))
        self.single = nn.Parameter(torch.empty(1, dtype=dtype))
        self.linear = nn.Linear(7, 3, dtype=dtype)
        self.conv = nn.Conv2d(3, 2, 2, dtype=dtype)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.last = nn.Parameter(torch.empty(2, dtype=dtype))


def torch_handle(module: nn.Module, group: torch.distributed.ProcessGroup, *, use_orig_params: bool) -> FlatParamHandle:
    handle = FlatParamHandle(
        list(module.parameters()),
        module,
        torch.device("cpu"),
        HandleShardingStrategy.FULL_SHARD,
        offload_params=False,
        mp_param_dtype=None,
        mp_reduce_dtype=None,
        keep_low_precision_grads=False,
        process_group=group,
        use_orig_params=use_orig_params,
        fsdp_extension=None,
    )
    handle.shard()
    return handle


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 13, 80])
def test_layout_equals_fsdp1(world: int, dtype: torch.dtype, use_orig_params: bool) -> None:
    # 80 ranks for some 70 elements: ranks of padding only, and shards of one element.
    for rank in range(0, world, max(1, world // 13)):
        module = Mixture(dtype)
        specs = [ParamSpec(name, param.shape, param.stride()) for name, param in module.named_parameters()]
        align = 16 // dtype.itemsize if use_orig_params else 1
        layout = FlatLayout.pack(specs, world=world, align=align, pad_total=use_orig_params)
        with fake_world(world, rank) as group:
            flat_param = torch_handle(module, group, use_orig_params=use_orig_params).flat_param
        assert list(flat_param._fqns) == [param.name for param in layout.params]
        assert flat_param._unpadded_unsharded_size.numel() == layout.numel
        assert flat_param._sharded_size.numel() == layout.shard_numel
        owned = {part.index: part for part in layout.owned(rank)}
        for index, info in enumerate(flat_param._shard_param_infos):
            assert info.in_shard == (index in owned)
            if info.in_shard:
                part = owned[index]
                assert (info.offset_in_shard, info.numel_in_shard) == (part.in_shard.start, part.in_shard.numel)
                ends = (info.intra_param_start_idx, info.intra_param_end_idx)  # FSDP1's ends are inclusive
                assert ends == (part.in_param.start, part.in_param.stop - 1)


# --- size -------------------------------------------------------------------------------------------------------------


def test_a_70b_model_on_1024_ranks_is_no_work() -> None:
    wide, narrow, hidden = 8192, 1024, 28672
    block: list[tuple[int, ...]] = [(wide, wide), (narrow, wide), (narrow, wide), (wide, wide)]
    block += [(hidden, wide), (hidden, wide), (wide, hidden), (wide,), (wide,)]
    units: list[list[tuple[int, ...]]] = [[(128256, wide), (wide,), (128256, wide)], *([block] * 80)]
    layouts: list[FlatLayout] = []
    owned: list[tuple[Owned, ...]] = []
    digests: set[str] = set()

    def work() -> None:
        layouts.extend(packed(shapes, 1024, 4, True) for shapes in units)
        owned.extend(layout.owned(rank) for layout in layouts for rank in range(0, 1024, 64))
        digests.update(layout.digest() for layout in layouts)

    calls = calls_of(work)
    assert calls < 100_000, calls  # some hundredths of a second
    assert sum(len(layout.params) for layout in layouts) == 723
    assert len(digests) == 2
    assert all(len(parts) in (1, 2, 3) for parts in owned)
