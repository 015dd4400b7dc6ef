"""Shampoo of another package on shards: the bits of one process, and states by name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flatfsdp
from flatfsdp import checkpoint
from tests.conftest import Run
from tests.features.test_matrix_steps import full_states, matrices_and_others, stepped, trained, wrapped

pytestmark = pytest.mark.distributed

pytest.importorskip("pytorch_optimizer")


def shampoo(parameters: Any) -> torch.optim.Optimizer:
    found: Any = importlib.import_module("pytorch_optimizer")
    made: torch.optim.Optimizer = found.Shampoo(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)
    return made


@pytest.mark.parametrize(
    ("front", "world", "settings"),
    [
        ("wrapper", 1, {}),
        ("wrapper", 3, {"bucket_bytes": 800}),
        ("wrapper", 2, {"clip": True, "accumulate": True}),
        ("wrapper", 4, {"sharding_strategy": "HYBRID_SHARD"}),
        ("fully_shard", 3, {}),
    ],
)
def test_steps_have_the_bits_of_one_process(front: str, world: int, settings: dict[str, Any], run: Run) -> None:
    results = run(world, trained, front, shampoo, tensors=True, sees="shampoo", **settings)
    assert [line for each in results for line in each] == []


def states_by_name(rank: int, world: int, path: str, front: str, save: bool) -> tuple[Any, Any]:
    """The whole states by name, after steps and a save, or as loaded; and after another step. Ranks have equal batches,
    so that the gradients of two and of four have the same bits."""
    model = wrapped(front)
    steps = flatfsdp.matrix_steps(shampoo, matrices_and_others(model, tensors=True)[0], sees="shampoo")
    if save:
        stepped(model, steps.optimizer, 0, range(2))
        checkpoint.save(path, model=model, optimizer=steps.optimizer)
    else:
        stepped(model, steps.optimizer, 0, range(1))
        checkpoint.load(path, model=model, optimizer=steps.optimizer)
    found = full_states(model, steps.optimizer)
    stepped(model, steps.optimizer, 0, range(3, 4))
    return found, full_states(model, steps.optimizer)


def unlike(found: Any, expected: Any) -> list[str]:
    assert {name: each.keys() for name, each in found.items()} == {name: each.keys() for name, each in expected.items()}
    return [
        f"{name}.{key}"
        for name, state in expected.items()
        for key, value in state.items()
        if not torch.equal(torch.as_tensor(found[name][key]), torch.as_tensor(value))
    ]


@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_states_are_saved_by_name_and_loaded_on_other_ranks(front: str, tmp_path: Path, run: Run) -> None:
    saved, later = run(4, states_by_name, str(tmp_path / "x"), front, True)[0]
    shapes = {tuple(value.shape) for value in saved["blocks.0.0.weight"].values() if isinstance(value, Tensor)}
    assert shapes == {(25, 25), (12, 12), (25, 12)}
    for world in (3, 2):
        for found, after in run(world, states_by_name, str(tmp_path / "x"), front, False):
            assert unlike(found, saved) == []
            assert world == 3 or unlike(after, later) == []
