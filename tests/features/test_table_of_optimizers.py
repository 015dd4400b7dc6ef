"""Each optimizer that sees whole tensors, in each front and strategy, on one to four ranks: the bits of one process.

Half of them with clipped gradients, half with accumulated ones, some gathered in bfloat16. A run without --thorough
plays one of eleven.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from flatfsdp import MixedPrecision, MixedPrecisionPolicy
from tests.conftest import Run
from tests.features.test_adafactor import hugging_face_adafactor
from tests.features.test_matrix_steps import adafactor, muon, trained
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed


def shampoo(params: Any) -> torch.optim.Optimizer:
    found: Any = importlib.import_module("pytorch_optimizer")
    made: torch.optim.Optimizer = found.Shampoo(params, lr=0.05, momentum=0.9, weight_decay=0.1)
    return made


def fused(params: Any) -> torch.optim.Optimizer:
    """Its step counts are on the device of its parameters."""
    return torch.optim.AdamW(params, lr=0.05, fused=True)


def of_eight_bits(params: Any) -> torch.optim.Optimizer:
    found: Any = importlib.import_module("bitsandbytes.optim")
    made: torch.optim.Optimizer = found.AdamW8bit(params, lr=0.05, min_8bit_size=64)
    return made


# How each is made, what it sees, and the package that it is of.
OPTIMIZERS: dict[str, tuple[Any, str | None, str]] = {
    "Muon": (muon, None, "torch"),
    "Muon on whole matrices": (muon, "matrices", "torch"),
    "Adafactor": (adafactor, "tensors", "torch"),
    "Adafactor, foreach": (partial(adafactor, foreach=True), "tensors", "torch"),
    "AdamW, fused": (fused, "tensors", "torch"),
    "Adafactor of transformers": (hugging_face_adafactor, "tensors", "transformers"),
    "Shampoo": (shampoo, "shampoo", "pytorch_optimizer"),
    "AdamW8bit of bitsandbytes": (of_eight_bits, "tensors", "bitsandbytes"),
}

STRATEGIES: list[tuple[str, list[int], dict[str, Any]]] = [
    ("wrapper", [1, 2, 3, 4], {"sharding_strategy": "FULL_SHARD"}),
    ("wrapper", [1, 2, 3, 4], {"sharding_strategy": "SHARD_GRAD_OP"}),
    ("wrapper", [4], {"sharding_strategy": "HYBRID_SHARD"}),
    ("fully_shard", [1, 2, 3, 4], {"reshard_after_forward": True}),
    ("fully_shard", [1, 2, 3, 4], {"reshard_after_forward": False}),
    ("fully_shard", [4], {"mesh": (2, 2)}),
]
LOW = {
    "wrapper": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "fully_shard": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


class Cell(NamedTuple):
    optimizer: str
    front: str
    world: int
    settings: dict[str, Any]

    def __str__(self) -> str:
        return ", ".join([self.optimizer, self.front, str(self.world), *map(str, self.settings.values())])


def cells() -> list[Cell]:
    found = []
    for optimizer in OPTIMIZERS:
        for front, worlds, settings in STRATEGIES:
            for world in worlds:
                number = len(found)
                more = {"clip": number % 2 == 0, "accumulate": number // 2 % 2 == 0}
                low = LOW[front] if number % 3 == 0 else {}
                found.append(Cell(optimizer, front, world, settings | more | low))
    return found


@pytest.mark.parametrize("cell", some(cells(), 11), ids=str)
def test_steps_have_the_bits_of_one_process(cell: Cell, run: Run) -> None:
    make, sees, package = OPTIMIZERS[cell.optimizer]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    results = run(
        cell.world, trained, cell.front, make, tensors=sees not in (None, "matrices"), sees=sees, **cell.settings
    )
    assert [line for each in results for line in each] == []
