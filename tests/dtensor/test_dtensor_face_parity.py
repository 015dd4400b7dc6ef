"""Training with parameters that are DTensors of rows is training in one process, over the settings of the wrapper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import parity
from tests.harness.dtensor_faces import dtensor_faces
from tests.harness.matrix import Cell, covering_array, hostile_world, legal_cells
from tests.harness.meshes import shared_mesh
from tests.harness.reference import Recipe
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed

# Nothing of NO_SHARD is split; and the model "nested" has a parameter without dimensions, which is refused.
ARRAY = covering_array([each for each in legal_cells() if each.strategy != "NO_SHARD" and each.model != "nested"])
INSIDE = [Cell(model=model, world=world, stepping="in the backward") for world, model in ((2, "tied"), (3, "frozen"))]
RECOMPUTED = [Cell(model="tied", checkpointing=each) for each in parity.CHECKPOINTING]


@dataclass(frozen=True)
class RowDTensors(parity.FSDP):
    """The wrapper over parameters that are DTensors at rest."""

    in_backward: bool = False

    def wrap(self, model: nn.Module, recipe: Recipe, options: dict[str, Any]) -> nn.Module:
        world = dist.get_world_size()
        mesh = shared_mesh(2, world // 2) if "HYBRID" in options.get("sharding_strategy", "") else shared_mesh(world)
        given = {**options, "use_orig_params": True, "layout": "rows"}
        with dtensor_faces(mesh):
            return super().wrap(model, recipe, given)


class RowsInBackward(RowDTensors, parity.StepsInBackward):
    """The same, with an optimizer that steps in backwards."""


def check(cell: Cell, **more: Any) -> None:
    engine = RowsInBackward() if cell.in_backward else RowDTensors()
    parity.check(cell.world, cell.recipe, engine=engine, **cell.options, **more)


@pytest.mark.parametrize("cell", some(ARRAY, 3), ids=str)
def test_pairs_of_settings(cell: Cell) -> None:
    check(cell, context=hostile_world)


@pytest.mark.parametrize("cell", [*INSIDE, *RECOMPUTED], ids=str)
def test_what_changes_a_backward(cell: Cell) -> None:
    check(cell)


OTHERS: list[tuple[Recipe, dict[str, Any]]] = [
    (Recipe("transformer"), {"backward_prefetch": None}),
    (Recipe("transformer"), {"forward_prefetch": True}),
    (Recipe("transformer", clip=0.5), {"mode": "close", "bound": 1e-6}),
    (Recipe("transformer", compute=torch.bfloat16, accumulated=torch.float32, micro=3), {}),
    (Recipe("conv"), {}),
    (Recipe("unused", micro=2), {}),
    (Recipe("unused", micro=2, accumulate="communicate"), {"sharding_strategy": "SHARD_GRAD_OP"}),
]


@pytest.mark.parametrize(
    ("recipe", "options"), some(OTHERS, 2), ids=lambda part: part.case if isinstance(part, Recipe) else str(part)
)
def test_other_settings(recipe: Recipe, options: dict[str, Any]) -> None:
    parity.check(2, recipe, engine=RowDTensors(), context=hostile_world, **options)
