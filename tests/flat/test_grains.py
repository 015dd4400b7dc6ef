"""Ranks with grains: agreement on them, checkpoints between plans, clipping. The parity matrix compares the numbers
with those of one process."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import StateDictType, checkpoint
from flatfsdp.errors import AgreementError
from flatfsdp.layout import Grain, Rows, Whole
from tests.conftest import Run
from tests.flat.test_grains_in_any_world import GRAINS, Net, wrapped

pytestmark = pytest.mark.distributed


def different(rank: int, world: int) -> None:
    wrapped({"blocks.0.0.weight": Rows(2 + rank)})(torch.tensor([1]))


def test_ranks_with_other_grains_get_an_error(pool2: Run) -> None:
    with pytest.raises(
        Exception, match=r"blocks.0.0.weight[^\n]*\n?[^\n]*cut at multiples of 1[28] elements"
    ) as caught:
        pool2(different)
    assert AgreementError.__name__ in str(caught.value)


OTHER: dict[str, Grain] = {"blocks.1": Whole(padding=inf), "embedding.weight": Rows(3), "frozen": Rows(2)}


def trained(layout: Any, policy: Any = None) -> tuple[Any, torch.optim.Optimizer]:
    model = wrapped(layout, auto_wrap_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def step(model: Any, optimizer: torch.optim.Optimizer, count: int) -> None:
    for number in range(count):
        model(torch.tensor([number, 3])).backward()
        optimizer.step()
        optimizer.zero_grad()


def full(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Whole parameters and states by name."""
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        found = dict(model.state_dict())
        for name, states in FSDP.optim_state_dict(model, optimizer)["state"].items():
            found |= {f"{name}.{key}": value for key, value in states.items() if isinstance(value, Tensor)}
    return found


def save(rank: int, world: int, path: str) -> dict[str, Tensor]:
    model, optimizer = trained(GRAINS, {nn.Sequential})
    step(model, optimizer, 2)
    checkpoint.save(path, model=model, optimizer=optimizer)
    return full(model, optimizer)


def load(rank: int, world: int, path: str, layout: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = trained(layout)
    step(model, optimizer, 1)
    checkpoint.load(path, model=model, optimizer=optimizer)
    loaded = full(model, optimizer)
    step(model, optimizer, 2)
    return loaded, full(model, optimizer)


def test_a_checkpoint_loads_into_another_plan_on_fewer_ranks(tmp_path: Path, run: Run) -> None:
    saved = run(4, save, str(tmp_path / "x"))[0]
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    step(net, optimizer, 2)
    for name, parameter in net.named_parameters():
        assert torch.allclose(saved[name], parameter, atol=1e-5), name
    results = []
    for layout in (OTHER, "flat"):
        loaded, later = run(3, load, str(tmp_path / "x"), layout)[0]
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        results.append(later)
    # Element-wise steps do not depend on cuts.
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def clipped(rank: int, world: int, layout: Any) -> tuple[float, dict[str, Tensor]]:
    model, optimizer = trained(layout, {nn.Sequential})
    for number in range(3):
        model(torch.tensor([number + rank, 3])).backward()
        norm = model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return float(norm), full(model, optimizer)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_clipped_steps_are_those_of_the_flat_layout(world: int, run: Run) -> None:
    planned, flat = (run(world, clipped, layout)[0] for layout in (GRAINS, "flat"))
    assert planned[0] == pytest.approx(flat[0], rel=1e-5)
    assert all(torch.allclose(planned[1][name], value, atol=1e-5) for name, value in flat[1].items())
