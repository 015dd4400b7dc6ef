"""Training under the engine is training in one process: every bit of every loss, gradient and parameter.

The settings are many and any two may disagree, so covering arrays try all pairs (`tools/parity_matrix` tries all
combinations) where every missing wait and every use of freed memory turns into NaN: on four ranks together with what
changes a backward (recomputation, an optimizer inside), on fewer without. Some are tried as they are.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from flatfsdp.engine.cpu import gloo
from flatfsdp.engine.cpu.exchange import SharedMemory
from flatfsdp.engine.cpu.groups import over_gloo
from flatfsdp.engine.flat.flat_param import FlatParamHandle
from tests.harness import parity, pool
from tests.harness.fake_device import streams
from tests.harness.matrix import (
    Cell,
    covering_array,
    crossed,
    crossed_pairs,
    each_alone,
    hostile_world,
    legal_cells,
    pairs_of,
)
from tests.harness.models import CASES
from tests.harness.reference import Recipe
from tests.harness.thorough import is_thorough, some, spread

pytestmark = pytest.mark.distributed

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

ARRAY = covering_array(legal_cells())
CROSSED = crossed(40 if is_thorough() else 0)


def all_pairs(cells: Any) -> set[Any]:
    return set().union(*map(pairs_of, cells))


def test_the_array_covers_every_legal_pair() -> None:
    assert all_pairs(ARRAY) == all_pairs(legal_cells())
    assert len(legal_cells()) == 11 * 360  # (strategy, world) times the rest
    assert len(ARRAY) <= 30


# Each is in cells of the array below, too; here the test's name shows the setting.
@pytest.mark.parametrize("cell", each_alone() if is_thorough() else [], ids=str)
def test_each_setting_alone(cell: Cell) -> None:
    cell.check()


# On four ranks, those that are crossed with more below.
@pytest.mark.parametrize("cell", [cell for cell in ARRAY if cell.world < 4 or is_thorough()], ids=str)
def test_all_pairs_of_settings_in_a_hostile_world(cell: Cell) -> None:
    cell.check(hostile=True)


@pytest.mark.parametrize("cell", some(ARRAY, 8), ids=str)
def test_all_pairs_of_settings(cell: Cell) -> None:
    cell.check()


IN_ROWS = [dataclasses.replace(cell, layout="rows") for cell in ARRAY if cell.layout != "rows"]


@pytest.mark.parametrize("cell", some(IN_ROWS, 8), ids=str)
def test_all_pairs_with_every_unit_in_rows(cell: Cell) -> None:
    cell.check(hostile=True)


BY_GRAINS = [dataclasses.replace(cell, layout="grains") for cell in ARRAY]


@pytest.mark.parametrize("cell", some(BY_GRAINS, 8), ids=str)
def test_all_pairs_with_every_unit_cut_by_grains(cell: Cell) -> None:
    cell.check(hostile=True)


def test_what_is_crossed_covers_every_legal_pair() -> None:
    assert all_pairs(CROSSED) == crossed_pairs()
    small = [cell for cell in ARRAY if cell.world < 4]
    assert all_pairs(small) | crossed_pairs() >= all_pairs(legal_cells())


@pytest.mark.parametrize("cell", CROSSED, ids=str)
def test_what_changes_a_backward_crossed_on_four_ranks(cell: Cell) -> None:
    cell.check(hostile=True)


OTHER_SETTINGS: list[tuple[Recipe, dict[str, Any]]] = [
    (Recipe("transformer"), {"backward_prefetch": None}),
    (Recipe("transformer"), {"backward_prefetch": "BACKWARD_POST"}),
    (Recipe("transformer"), {"forward_prefetch": True}),
    (Recipe("transformer"), {"limit_all_gathers": False, "use_orig_params": True}),
    # The norm may round otherwise. Keys' biases have gradients of nothing but rounding, which AdamW scales to steps.
    (Recipe("transformer", clip=0.5), {"use_orig_params": True, "mode": "close", "bound": 1e-6}),
    (Recipe("mlp", optimizer="adamw", clip=0.5), {"use_orig_params": True, "mode": "close", "bound": 1e-6}),
    (Recipe("transformer", compute=BF16, reduce=FP32, optimizer="adamw"), {}),
    (Recipe("transformer", compute=BF16, accumulated=FP32, micro=3), {}),
    (Recipe("mlp", reduce=FP16, accumulated=FP32, micro=3), {"cpu_offload": True}),
    (Recipe("conv"), {"use_orig_params": True}),
    (Recipe("conv", compute=BF16, reduce=FP32, buffers=BF16), {}),
    (Recipe("conv", compute=BF16, buffers=BF16, nested=False), {"sharding_strategy": "SHARD_GRAD_OP"}),
    (Recipe("unused", micro=2), {"use_orig_params": True}),
    (Recipe("unused", micro=2, accumulate="communicate"), {"sharding_strategy": "SHARD_GRAD_OP"}),
]


@pytest.mark.parametrize(
    ("recipe", "options"), OTHER_SETTINGS, ids=lambda part: part.case if isinstance(part, Recipe) else str(part)
)
def test_other_settings(recipe: Recipe, options: dict[str, Any]) -> None:
    parity.check(2, recipe, context=hostile_world, **options)


@contextmanager
def one_late_rank() -> Iterator[None]:
    """Rank 1 is the last to share its gradients."""
    post = SharedMemory.sum_pieces

    def late(self: SharedMemory, *args: Any) -> Any:
        time.sleep(0.02 if dist.get_rank() == 1 else 0)
        return post(self, *args)

    with patch.object(SharedMemory, "sum_pieces", late):
        yield


@contextmanager
def one_late_rank_of_gloo() -> Iterator[None]:
    """Rank 1 is the last to send its gradients."""
    scatter = gloo.GlooAllToAll._scatter

    def late(self: gloo.GlooAllToAll, *args: Any) -> Any:
        time.sleep(0.02 if dist.get_rank() == 1 else 0)
        return scatter(self, *args)

    with over_gloo(), patch.object(gloo.GlooAllToAll, "_scatter", late):
        yield


@pytest.mark.parametrize(
    ("world", "strategy", "context"),
    some(
        [
            (world, strategy, context)
            for context in (one_late_rank, one_late_rank_of_gloo)
            for world, strategy in ((3, "FULL_SHARD"), (4, "FULL_SHARD"), (4, "NO_SHARD"), (3, "NO_SHARD"))
        ],
        2,
    ),
)
def test_sums_are_in_rank_order_however_late_a_rank_is(world: int, strategy: str, context: Any) -> None:
    parity.check(world, Recipe("mlp", reduce=FP16), context=context, sharding_strategy=strategy)


@contextmanager
def hostile_over_gloo() -> Iterator[None]:
    with hostile_world(), over_gloo():
        yield


@contextmanager
def streams_over_gloo() -> Iterator[None]:
    with streams(), over_gloo():
        yield


# Shared memory is the default.
@pytest.mark.parametrize(
    ("context", "cell"),
    spread([over_gloo, hostile_over_gloo, streams_over_gloo], some(ARRAY, 5, 2)),
    ids=str,
)
def test_exchanges_over_gloo_change_no_number(cell: Cell, context: Any) -> None:
    parity.check(cell.world, cell.recipe, context=context, **cell.options)


@contextmanager
def impatient() -> Iterator[None]:
    """A hostile world in which no stream waits for gathers."""
    wait = FlatParamHandle.wait_unshard

    def forget(self: FlatParamHandle) -> None:
        self.pending = None
        wait(self)

    with hostile_world(), patch.object(FlatParamHandle, "wait_unshard", forget):
        yield


def test_a_missing_wait_shows() -> None:
    with pytest.raises(AssertionError, match="differ, by a norm of nan"):
        parity.check(2, Recipe("mlp", steps=1), context=impatient)


@pytest.mark.parametrize("cell", ARRAY[::5], ids=str)
def test_streams_change_no_number(cell: Cell) -> None:
    options = cell.options | {"limit_all_gathers": cell.offload}
    parity.check(cell.world, cell.recipe, context=streams, **options)


@pytest.mark.parametrize(("offload", "strategy"), spread([False, True], ["FULL_SHARD", "NO_SHARD"]))
def test_streams_change_no_number_of_an_optimizer_in_backward(strategy: str, offload: bool) -> None:
    cell = Cell(strategy, 2, use_orig_params=offload, offload=offload, stepping="in the backward")
    options = cell.options | {"join_units_below": 0}
    parity.check(2, cell.recipe, engine=parity.StepsInBackward(), context=streams, **options)


@pytest.mark.parametrize("case", ["mlp", "transformer", "tied", "frozen", "conv"])
def test_two_ranks_are_ddp_bit_for_bit(case: str) -> None:
    recipe = Recipe(case)
    ddp = parity.check(2, recipe, engine=parity.DDP())
    ours = parity.check(2, recipe, sharding_strategy="FULL_SHARD", use_orig_params=True)
    assert not parity.compare(ours, ddp, mode="bit")


@pytest.mark.parametrize(
    ("world", "case"),
    spread([2, 3, 4], [name for name, case in CASES.items() if case.concatenable and name != "dtypes"]),
)
def test_ranks_agree_with_one_batch(case: str, world: int) -> None:
    parity.check(world, Recipe(case, micro=2), oracle="concatenated", mode="close", bound=1e-5, use_orig_params=True)


@pytest.fixture(scope="module")
def six() -> Any:
    yield 6
    pool.discard(6)


@pytest.mark.parametrize(
    "recipe", some([Recipe("mlp", replicas=2, reduce=FP16, micro=2), Recipe("transformer", replicas=2)], 2)
)
def test_two_replicas_of_three_ranks(six: int, recipe: Recipe) -> None:
    recipe = dataclasses.replace(recipe, steps=2)
    parity.check(six, recipe, sharding_strategy="HYBRID_SHARD", mesh=(2, 3), use_orig_params=True)
    parity.check(six, recipe, sharding_strategy="_HYBRID_SHARD_ZERO2", mesh=(2, 3))
