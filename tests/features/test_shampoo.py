"""Shampoo of another package on shards: the bits of one process, and states by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flatfsdp
from flatfsdp import checkpoint
from tests.conftest import Run
from tests.features.test_matrix_steps import full_states, matrices_and_others, stepped, trained, wrapped
from tests.features.test_table_of_optimizers import shampoo

pytestmark = pytest.mark.distributed

pytest.importorskip("pytorch_optimizer")


@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_steps_have_the_bits_of_one_process(front: str, pool3: Run) -> None:
    results = pool3(trained, front, shampoo, tensors=True, sees="shampoo", bucket_bytes=800)
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
