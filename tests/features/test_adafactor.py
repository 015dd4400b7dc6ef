"""Adafactor of torch and of transformers on shards: the bits of one process, and states of rows and columns by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flatfsdp
from flatfsdp import checkpoint
from tests.conftest import Run
from tests.features.test_matrix_steps import adafactor, full_states, matrices_and_others, stepped, trained, wrapped

pytestmark = pytest.mark.distributed


def hugging_face_adafactor(params: Any) -> torch.optim.Optimizer:
    optimization = importlib.import_module("transformers.optimization")  # an extra of the trainer
    return optimization.Adafactor(params, lr=0.05, relative_step=False, beta1=0.9)


HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
ADAFACTORS = [
    adafactor,
    pytest.param(hugging_face_adafactor, marks=pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers")),
]


@pytest.mark.parametrize("make", ADAFACTORS)
@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_steps_have_the_bits_of_one_process(front: str, make: Any, pool3: Run) -> None:
    results = pool3(trained, front, make, tensors=True, sees="tensors")
    assert [line for each in results for line in each] == []


def of_shapes(rank: int, world: int, path: str, front: str, make: Any, save: bool) -> dict[str, dict[str, Tensor]]:
    """The whole states by name, after steps and a save, or as loaded; and after another step."""
    model = wrapped(front)
    steps = flatfsdp.matrix_steps(make, matrices_and_others(model, tensors=True)[0], sees="tensors")
    if save:
        stepped(model, steps.optimizer, rank, range(2))
        checkpoint.save(path, model=model, optimizer=steps.optimizer)
    else:
        stepped(model, steps.optimizer, rank, range(1))
        checkpoint.load(path, model=model, optimizer=steps.optimizer)
    found = full_states(model, steps.optimizer)
    stepped(model, steps.optimizer, rank, range(3, 4))
    again = full_states(model, steps.optimizer)
    assert found.keys() == again.keys()
    assert all(found[name].keys() == again[name].keys() for name in found)
    return found


@pytest.mark.parametrize("make", ADAFACTORS)
@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_states_of_rows_and_columns_are_saved_by_name(front: str, make: Any, tmp_path: Path, run: Run) -> None:
    saved = run(4, of_shapes, str(tmp_path / "x"), front, make, True)[0]
    loaded = run(3, of_shapes, str(tmp_path / "x"), front, make, False)
    shapes = {tuple(value.shape) for value in saved["blocks.0.0.weight"].values() if isinstance(value, Tensor)}
    assert shapes & {(25, 1), (25,)} and shapes & {(1, 12), (12,)}
    for found in loaded:
        assert found.keys() == saved.keys()
        for name, state in saved.items():
            assert found[name].keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(found[name][key]), torch.as_tensor(value)), (name, key)
