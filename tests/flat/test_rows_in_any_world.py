"""Parameters that are split by rows: each rank's elements, their bytes, and their exchange, in any world."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision, StateDictType
from flatfsdp.errors import UsageError
from tests.harness import inspect
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

WORLDS = (2, 3, 7, 64)


class Net(nn.Module):
    """Parameters of many shapes: fewer rows than ranks, a scalar, none, another memory order, frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 6)
        self.linear = nn.Linear(6, 29)
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        # Its first dimension is not its slowest one.
        self.across = nn.Parameter(torch.randn(4, 9).t())
        self.frozen = nn.Parameter(torch.randn(8, 3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.embedding(x)).sum() * self.gain + self.nothing.sum()
        return x + self.across.sum() + self.frozen.sum() + self.conv(torch.ones(1, 3, 4, 4)).sum()


def pieces(world: int) -> dict[str, list[Tensor]]:
    """The chunks of each parameter by `torch.chunk`, in memory order; empty for ranks that it leaves out."""
    found = {}
    for name, parameter in Net().named_parameters():
        whole = parameter.detach()
        dim = 1 if name == "across" else 0
        chunks = [*whole.unsqueeze(0).chunk(world)] if whole.dim() == 0 else [*whole.chunk(world, dim)]
        in_order = [each.permute(1, 0) if name == "across" else each for each in chunks]
        if name == "conv.weight":
            in_order = [each.permute(0, 2, 3, 1) for each in chunks]
        found[name] = [each.reshape(-1) for each in in_order] + [whole.new_empty(0)] * (world - len(chunks))
    return found


def shard_numel(world: int, *, trainable: bool) -> int:
    """The size of each rank's shard: as many rows of each parameter as the first rank has."""
    trained = {name: parameter.requires_grad for name, parameter in Net().named_parameters()}
    return sum(chunks[0].numel() for name, chunks in pieces(world).items() if trained[name] is trainable)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("original", [True, False])
def test_each_rank_has_the_rows_that_chunk_gives_it(world: int, original: bool) -> None:
    expected = pieces(world)
    for rank in sorted({0, 1, world // 2, world - 1}):
        with fake_world(world, rank):
            model = FullyShardedDataParallel(Net(), use_orig_params=original, layout="rows")
            if original:
                found = {name: parameter.detach() for name, parameter in model.named_parameters()}
            else:
                found = {
                    spec.name: view.detach()
                    for flat in inspect.unit(model).flat_params
                    for spec, view in zip(flat.layout.params, flat.sharded_views, strict=True)
                }
            assert found.keys() == expected.keys()
            for name, chunks in expected.items():
                assert torch.equal(found[name], chunks[rank]), name
            size = 4 * sum(shard_numel(world, trainable=each) for each in (True, False))
            assert flatfsdp.stats(model).bytes_params == size
            assert {tuple(each.shape) for each in model.parameters()} >= (
                set() if original else {(shard_numel(world, trainable=True),)}
            )


def test_pieces_of_parameters_begin_at_different_places() -> None:
    with fake_world(64, 63):
        model = FullyShardedDataParallel(Net(), use_orig_params=True, layout="rows")
        (trained, _) = inspect.unit(model).flat_params
        offsets = [view.storage_offset() for view in trained.sharded_views]
        with_elements = [k for k, spec in enumerate(trained.layout.params) if spec.numel]
        assert len({offsets[k] for k in with_elements}) == len(with_elements)


@pytest.mark.parametrize("mixed", [None, MixedPrecision(param_dtype=torch.bfloat16)])
@pytest.mark.parametrize("world", WORLDS)
def test_parameters_begin_on_16_bytes_of_what_is_gathered(world: int, mixed: MixedPrecision | None) -> None:
    for original in (True, False):
        with fake_world(world, world - 1):
            model = FullyShardedDataParallel(Net(), use_orig_params=original, layout="rows", mixed_precision=mixed)
            for flat in inspect.unit(model).flat_params:
                assert {span.start % (8 if mixed else 4) for span in flat.layout.spans} == {0}


@pytest.mark.parametrize("world", [2, 64])
def test_a_unit_is_gathered_and_reduced_at_once(world: int) -> None:
    with fake_world(world):
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), layout="rows")
        figures = flatfsdp.stats(model)
        x = torch.zeros(1, 6)
        model(x).sum().backward()
        figures.reset()
        model(x).sum().backward()
        # ceil(5 / world) rows of 6 and of 1, ceil(3 / world) of 5 and of 1
        rows = -(-5 // world) * 7 + -(-3 // world) * 6
        size = 4 * world * rows
        assert {kind: count for kind, count in figures.comm.items() if kind != "scalar"} == {
            "all_gather": (1, size),
            "reduce_scatter": (1, size),
        }
        assert figures.bytes_staged == 2 * size  # all of them are small
        figures.reset()
        assert figures.bytes_staged == 0


def test_one_rank_has_the_layout_of_one_segment() -> None:
    layouts: list[Any] = []
    for layout in ("rows", "flat"):
        with fake_world(1):
            model = FullyShardedDataParallel(Net(), use_orig_params=True, layout=layout)
            layouts.append([flat.layout for flat in inspect.unit(model).flat_params])
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
                model.state_dict()
    assert layouts[0] == layouts[1]


def test_the_summary_reports_it() -> None:
    with fake_world(4):
        model = FullyShardedDataParallel(nn.Linear(6, 5), layout="rows")
        text = flatfsdp.summary(model)
        # 2 rows of 6 and 2 of 1 for each of 4 ranks, of 5 and 5
        assert "35          56       21  FULL_SHARD  4 x 1  float32 in rows" in text
    with fake_world(4):
        assert "in rows" not in flatfsdp.summary(FullyShardedDataParallel(nn.Linear(6, 5)))


def test_local_state_dicts_are_refused_in_words() -> None:
    with fake_world(2):
        flat = FullyShardedDataParallel(nn.Linear(6, 5))
        with FullyShardedDataParallel.state_dict_type(flat, StateDictType.LOCAL_STATE_DICT):
            local = flat.state_dict()
        model = FullyShardedDataParallel(nn.Linear(6, 5), layout="rows")
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            expected = 'LOCAL_STATE_DICT of unit <root>: it was wrapped with layout="rows", where a shard has pieces'
            with pytest.raises(UsageError, match=expected):
                model.state_dict()
            with pytest.raises(UsageError, match=expected):
                model.load_state_dict(local)


def test_copies_and_pickles_keep_the_layout() -> None:
    with fake_world(3, 2):
        model = FullyShardedDataParallel(Net(), use_orig_params=True, layout="rows")
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for mine, its in zip(inspect.unit(model).flat_params, inspect.unit(other).flat_params, strict=True):
                assert mine.layout == its.layout and torch.equal(mine.shard, its.shard)
            assert "in rows" in flatfsdp.summary(other)
            other(torch.tensor([1])).backward()


def test_a_dry_run_and_a_plan_count_the_padding() -> None:
    with flatfsdp.dry_run(64):
        model = FullyShardedDataParallel(nn.Linear(6, 5, device="meta"), use_orig_params=True, layout="rows")
        plan = flatfsdp.memory_plan(model)
        assert plan.params == 4 * (6 + 1)
        assert plan.comm["all_gather"] == (1, 64 * 4 * (6 + 1))
        assert plan.unsharded_peak == 64 * 4 * (6 + 1)
