"""Optimizers that are not known are tried before they step on parts of parameters, or on whole matrices of several
ranks; those that look at more than single elements, or than one matrix, are refused in words."""

from __future__ import annotations

import random
import warnings
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import FlatFSDPWarning, UsageError
from flatfsdp.layout import Whole
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process


class Momentum(torch.optim.Optimizer):
    """Element-wise, of a class that is not torch's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                self.update(p, momentum, group["lr"])

    def update(self, p: Tensor, by: Tensor, lr: float) -> None:
        p.addcdiv_(by, by.abs().sqrt() + 1e-8, value=-lr)


class Trusting(Momentum):
    """LAMB's ratio of norms."""

    def update(self, p: Tensor, by: Tensor, lr: float) -> None:
        p.sub_(by * (p.norm() / by.norm().clamp(min=1e-8)), alpha=lr)


class OfRows(Momentum):
    def update(self, p: Tensor, by: Tensor, lr: float) -> None:
        p.sub_(by / by.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-8), alpha=lr)


class Centering(Momentum):
    """Only for matrices, as Ranger."""

    def update(self, p: Tensor, by: Tensor, lr: float) -> None:
        p.sub_(by - by.mean(1, keepdim=True) if by.dim() > 1 else by, alpha=lr)


class InGroups(Momentum):
    """One of its groups is not element-wise."""

    def __init__(self, params: Any) -> None:
        first, *others = params
        super().__init__([{"params": [first], "norms": False}, {"params": others, "norms": True}])

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.update = Trusting.update.__get__(self) if group["norms"] else Momentum.update.__get__(self)  # type: ignore[method-assign]
            super().step()


class Closing(Momentum):
    def step(self, closure: Any = None) -> None:
        closure()
        super().step()


NORMS = [Trusting, OfRows, Centering, InGroups]


def wrapped(cls: Any, **options: Any) -> Any:
    """A new model of two matrices, with gradients of zeros, and an optimizer of it."""
    net = nn.Sequential(nn.Linear(16, 15), nn.Linear(15, 16))
    model = FullyShardedDataParallel(net, **({"use_orig_params": True} | options))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, cls(model.parameters())


@pytest.mark.parametrize("cls", NORMS)
def test_what_is_not_element_wise_is_refused_on_parts(cls: Any) -> None:
    with fake_world(2):
        for orig in (True, False) if cls is not InGroups else (True,):  # which needs several parameters
            _model, optimizer = wrapped(cls, use_orig_params=orig)
            for _ in range(2):
                with pytest.raises(UsageError, match=rf"{cls.__name__} is not element-wise: in a trial .*matrix_steps"):
                    optimizer.step()
            assert not optimizer.state and optimizer.count == 0


def test_a_warm_up_hides_nothing() -> None:
    """With a learning rate of 0 no parameter moves."""
    with fake_world(2):
        _model, optimizer = wrapped(Trusting)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        with pytest.raises(UsageError, match="Trusting is not element-wise"):
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0


@pytest.mark.parametrize("cls", NORMS)
def test_it_may_step_on_whole_parameters(cls: Any) -> None:
    with fake_world(1):
        _model, optimizer = wrapped(cls)
        optimizer.step()
    with fake_world(2):
        for options in ({"layout": lambda name, parameter: Whole(padding=inf)}, {"sharding_strategy": "NO_SHARD"}):
            _model, optimizer = wrapped(cls, **options)
            optimizer.step()
        _model, vouched = wrapped(cls)
        flatfsdp.fuse_optimizer_steps(vouched, elementwise=True)
        vouched.step()


def test_an_element_wise_one_steps_as_if_there_was_no_trial() -> None:
    with fake_world(2), warnings.catch_warnings():
        warnings.simplefilter("error", FlatFSDPWarning)
        torch.manual_seed(0)
        random.seed(0)
        for options in ({}, {"use_orig_params": False}, {"layout": "rows"}):
            _model, optimizer = wrapped(Momentum, **options)
            before = torch.get_rng_state(), random.getstate()
            optimizer.step()
            optimizer.step()
            assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
            assert optimizer.count == 2
            held = [each for each in optimizer.param_groups[0]["params"] if each.grad is not None]
            assert set(optimizer.state) == {*held}
            assert all(optimizer.state[each]["momentum"].shape == each.shape for each in held)


def test_one_that_cannot_be_tried_is_named() -> None:
    with fake_world(2):
        _model, optimizer = wrapped(Closing)
        with pytest.warns(
            FlatFSDPWarning,
            match="not known whether Closing can step on this rank's share of what it steps on, because",
        ):
            optimizer.step(lambda: None)


class Scaled(Momentum):
    """One with a factor for all parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.prepare()

    def prepare(self) -> None: ...

    def factor(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.by = self.factor()
        super().step()

    def update(self, p: Tensor, by: Tensor, lr: float) -> None:
        p.sub_(by * p.norm(), alpha=lr * self.by)


class Replacing(Scaled):
    """Numbers that a step replaces, each time by the same."""

    def prepare(self) -> None:
        self.param_groups[0]["k"] = 0

    def factor(self) -> float:
        self.param_groups[0]["k"] += 1
        return 1 / (self.count + 1) + 1 / self.param_groups[0]["k"]


class Estimating(Scaled):
    """A value that follows from all parameters, as Prodigy's estimate of the learning rate."""

    def factor(self) -> float:
        self.param_groups[0]["d"] = sum(float(each.grad.abs().sum()) for each in self.param_groups[0]["params"])
        return float(self.param_groups[0]["d"]) / 1000


class Clipping(Scaled):
    """A norm of all gradients, which is not kept."""

    def factor(self) -> float:
        return 1 / float(sum(each.grad.square().sum() for each in self.param_groups[0]["params"])) ** 0.5


class CountingInPlace(Scaled):
    def prepare(self) -> None:
        self.counts = {"steps": [0]}

    def factor(self) -> float:
        self.counts["steps"][0] += 1
        return 1 / self.counts["steps"][0]


class CountingOfGroup(Scaled):
    def prepare(self) -> None:
        self.param_groups[0]["k"] = torch.zeros(())

    def factor(self) -> float:
        self.param_groups[0]["k"] += 1
        return 1 / float(self.param_groups[0]["k"])


class CountingInState(Scaled):
    def prepare(self) -> None:
        self.state["all"] = torch.zeros(())  # type: ignore[index]

    def factor(self) -> float:
        self.state["all"] += 1  # type: ignore[index]
        return 1 / float(self.state["all"])  # type: ignore[index, arg-type]


class DrawingOfItsOwn(Scaled):
    def prepare(self) -> None:
        self.numbers = random.Random(0)

    def factor(self) -> float:
        return self.numbers.random()


class DrawingOfAGenerator(Scaled):
    def prepare(self) -> None:
        self.helper = SimpleNamespace(generator=torch.Generator())

    def factor(self) -> float:
        return float(torch.rand(1, generator=self.helper.generator))


class Drawing(Scaled):
    def update(self, p: Tensor, by: Tensor, lr: float) -> None:
        p.sub_(by * torch.rand_like(p), alpha=lr)


class DrawingOfPython(Scaled):
    def update(self, p: Tensor, by: Tensor, lr: float) -> None:
        p.sub_(by, alpha=lr * random.random())


class DrawingOfNumpy(Scaled):
    def update(self, p: Tensor, by: Tensor, lr: float) -> None:
        p.sub_(by, alpha=lr * numpy.random.rand())


OF_ALL = [Estimating, Clipping, CountingInPlace, CountingOfGroup, CountingInState]
RANDOM = [DrawingOfItsOwn, DrawingOfAGenerator, Drawing, DrawingOfPython, DrawingOfNumpy]


@pytest.mark.parametrize("cls", OF_ALL + RANDOM)
def test_what_depends_on_other_matrices_is_refused_before_any_rank_steps(cls: Any) -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    made = cls([parameter])
    with pytest.raises(
        UsageError, match=f"{cls.__name__} cannot be given to matrix_steps: in a trial .* depend on other"
    ):
        flatfsdp.matrix_steps(made, sees="tensors")
    assert made.count == 0 and {*made.state} <= {"all"} and torch.equal(parameter, torch.ones(4, 4))


@pytest.mark.parametrize("cls", [Momentum, Trusting, OfRows, Replacing])
def test_what_steps_on_each_matrix_by_itself_is_taken(cls: Any) -> None:
    made = cls([nn.Parameter(torch.ones(4, 4))])
    before = torch.get_rng_state(), random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FlatFSDPWarning)
        flatfsdp.matrix_steps(made, sees="tensors")
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert made.count == 0 and not made.state


def test_one_that_cannot_be_tried_on_matrices_is_named() -> None:
    made = Closing([nn.Parameter(torch.ones(4, 4))])
    with pytest.warns(FlatFSDPWarning, match="not known whether Closing can step on this rank's share"):
        flatfsdp.matrix_steps(made, sees="tensors")
