"""Optimizers that look at whole tensors step on parameters with the grain `Whole()` as they are: the bits of one
process, the shapes of matrices, and states that travel by name."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, checkpoint
from flatfsdp.layout import Grain, Whole
from tests.conftest import Run
from tests.features.test_matrix_steps import adafactor, full_states, muon, whole
from tests.harness.corners import seeded

pytestmark = pytest.mark.distributed


class Rooted(torch.optim.Optimizer):
    """Norms of rows and columns, as in Shampoo, for tensors of any shape."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                for dim in range(parameter.dim()):
                    others = [each for each in range(parameter.dim()) if each != dim]
                    square = parameter.grad.square().sum(others, keepdim=True) if others else parameter.grad.square()
                    state[f"squares {dim}"] = state.get(f"squares {dim}", 0) + square
                factor = torch.stack([each.rsqrt().mean() for each in state.values()]).prod()
                parameter.add_(parameter.grad * factor, alpha=-group["lr"])


class Net(nn.Module):
    """Matrices, one of them stored by columns, vectors, and a tensor of four dimensions in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(12, 25), nn.Tanh(), nn.Linear(25, 12))
        self.block[0].weight = nn.Parameter(torch.randn(12, 25).T)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.row = nn.Linear(12, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.row(x + self.block(x)).square().mean() + self.conv(x.view(-1, 3, 2, 2)).square().mean()


def every(name: str, parameter: Tensor) -> Grain:
    return Whole(padding=inf)


def wrapped(**settings: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        seeded(Net), auto_wrap_policy={nn.Sequential}, use_orig_params=True, **({"layout": every} | settings)
    )


def stepped_by(model: nn.Module, make: Any) -> list[nn.Parameter]:
    shapes = flatfsdp.unsharded_shapes(model)
    return [each for name, each in model.named_parameters() if make is not muon or len(shapes[name]) == 2]


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * number + rank))


def trained(rank: int, world: int, make: Any, path: str, **settings: Any) -> tuple[list[str], list[tuple[int, ...]]]:
    """The differences to one process after some steps, and the shapes of parameters; saves if there is a `path`."""
    model = wrapped(**settings)
    shapes = [tuple(each.shape) for each in model.parameters()]
    optimizer, one_process = make(stepped_by(model, make)), seeded(Net)
    reference = make([each for each in one_process.parameters() if make is not muon or each.dim() == 2])
    for number in range(3):
        model(batch(rank, number)).backward()
        model.clip_grad_norm_(0.1)
        gradients = whole(model, "grad")
        for name, parameter in one_process.named_parameters():
            parameter.grad = gradients[name]
        reference.step()
        optimizer.step()
        assert [tuple(each.shape) for each in model.parameters()] == shapes
        model.zero_grad()
        wrapped(**settings)  # parameters are checked again at the next step
    found = whole(model, "data")
    if path:
        checkpoint.save(path, model=model, optimizer=optimizer)
    return [name for name, each in one_process.named_parameters() if not torch.equal(found[name], each)], shapes


@pytest.mark.parametrize("make", [adafactor, muon, Rooted])
def test_steps_have_the_bits_of_one_process(make: Any, pool3: Run) -> None:
    results = pool3(trained, make, "")
    assert [differing for differing, _ in results] == [[]] * 3
    for shape in [(25, 12), (12, 25), (4, 3, 2, 2), (1, 12)]:
        found = [
            next(each for each in shapes if each[1:] == shape[1:] and each[0] in (0, shape[0])) for _, shapes in results
        ]
        assert sorted(found) == [(0, *shape[1:]), (0, *shape[1:]), shape]


@pytest.mark.parametrize("settings", [{"sharding_strategy": "SHARD_GRAD_OP"}, {"sharding_strategy": "NO_SHARD"}])
def test_steps_under_other_strategies(settings: dict[str, Any], pool2: Run) -> None:
    assert [differing for differing, _ in pool2(trained, adafactor, "", **settings)] == [[], []]


def stepped_in_backwards(rank: int, world: int, make: Any) -> list[str]:
    """The differences to one process. Two equal batches have the gradients of one, to the bit."""
    model, alone = wrapped(), seeded(Net)
    optimizer = make(stepped_by(model, make))
    reference = make([each for each in alone.parameters() if make is not muon or each.dim() == 2])
    flatfsdp.optimizer_in_backward(model, optimizer)
    for number in range(5):
        for each in (model, alone):
            each.zero_grad()
            each(batch(0, number)).backward()
        reference.step()
        optimizer.step()
    found = whole(model, "data")
    return [name for name, each in alone.named_parameters() if not torch.equal(found[name], each)]  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [adafactor, muon])
def test_steps_in_the_backward(make: Any, pool2: Run) -> None:
    assert pool2(stepped_in_backwards, make) == [[], []]


def loaded(rank: int, world: int, make: Any, path: str, layout: Any) -> dict[str, dict[str, Any]]:
    model = wrapped(layout=layout or "flat")
    optimizer = make(stepped_by(model, make))
    if layout is None:
        flatfsdp.matrix_steps(optimizer, sees="tensors")
    checkpoint.load(path, model=model, optimizer=optimizer)
    return full_states(model, optimizer)


@pytest.mark.parametrize("make", [adafactor, Rooted])
def test_states_travel_by_name(make: Any, tmp_path: Path, run: Run, pool2: Run) -> None:
    assert [differing for differing, _ in run(3, trained, make, str(tmp_path / "x"))] == [[]] * 3
    (saved,) = run(1, loaded, make, str(tmp_path / "x"), every)
    assert len(saved) == 7
    for found in [*pool2(loaded, make, str(tmp_path / "x"), every), *pool2(loaded, make, str(tmp_path / "x"), None)]:
        assert found.keys() == saved.keys()
        for name, state in saved.items():
            assert found[name].keys() == state.keys() and state
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(found[name][key]), torch.as_tensor(value)), (name, key)
