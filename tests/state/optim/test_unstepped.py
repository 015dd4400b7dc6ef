"""Optimizers that step on nothing, as param groups by name make them of flat parameters: reported once, and nothing
else is taken for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import errors, optimizer_in_backward
from tests.conftest import Run

pytestmark = pytest.mark.distributed

STEPS = 4
OF_FLAT = (
    "The names of flat parameters end in '_flat_param' ({}), so param groups selected by names such as 'bias' are "
    "empty; use_orig_params=True keeps the original names. Only parameters() of a wrapped module returns its flat "
    "parameter; modules inside of it do not. If this is intended, call requires_grad_(False) on them to avoid "
    "computing their gradients"
)


def wrapped(**settings: Any) -> Any:
    torch.manual_seed(0)
    return FSDP(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), auto_wrap_policy={nn.Linear}, **settings)


def loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    found: Tensor = model(x).square().mean()
    return found


def by_name(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    weights = [parameter for name, parameter in named if name.endswith("weight")]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": weights}], lr=0.1)


def empty() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": []}], lr=0.1)


# Each is a step of training, or prepares such a step, and yields once per step.


def groups_by_name(rank: int, **settings: Any) -> Iterator[None]:
    model = wrapped(**settings)
    optimizer = by_name(model)
    while True:
        loss(model, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def groups_that_match(rank: int) -> Iterator[None]:
    return groups_by_name(rank, use_orig_params=True)


def by_hand(rank: int) -> Iterator[None]:
    """An optimizer of nothing carries the learning rate for a scheduler."""
    model, optimizer = wrapped(), empty()
    while True:
        loss(model, rank).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
        yield


def by_hand_through_data(rank: int) -> Iterator[None]:
    model, optimizer = wrapped(use_orig_params=True), empty()
    while True:
        loss(model, rank).backward()
        optimizer.step()
        for parameter in model.parameters():
            if parameter.grad is not None:  # there is one where this rank holds elements
                parameter.data -= 0.1 * parameter.grad
        yield


def by_nobody(rank: int) -> Iterator[None]:
    model = wrapped()
    while True:
        loss(model, rank).backward()
        yield


class OfTheirOwn:
    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.data.add_(parameter.grad, alpha=-0.1)


def of_another_library(rank: int) -> Iterator[None]:
    model = wrapped()
    optimizer, other = OfTheirOwn(list(model.parameters())), empty()
    while True:
        loss(model, rank).backward()
        optimizer.step()
        other.step()
        yield


def in_the_backward(rank: int) -> Iterator[None]:
    model, other = wrapped(), empty()
    optimizer_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    while True:
        loss(model, rank).backward()
        other.step()
        yield


def accumulated(rank: int) -> Iterator[None]:
    """The optimizer of the model steps after many backwards, one that is idle as yet after each."""
    model = wrapped()
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1)
    while True:
        for _ in range(3):
            loss(model, rank).backward()
            other.step()
        optimizer.step()
        yield


def looked_at(rank: int) -> Iterator[None]:
    """The gradients of a model that is not trained are read during the training of another model."""
    model, other = wrapped(), wrapped()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    while True:
        loss(model, rank).backward()
        loss(other, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def game(rank: int) -> Iterator[None]:
    """The maker moves first, through the judge, whose gradients are of no use then."""
    maker, judge = wrapped(), wrapped()
    makers, judges = (torch.optim.Adam(each.parameters(), lr=0.1) for each in (maker, judge))
    while True:
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
        judge(maker(x)).mean().backward()
        makers.step()
        judges.zero_grad()
        (judge(x) - judge(maker(x).detach())).mean().backward()
        judges.step()
        makers.zero_grad()
        yield


class Parts(nn.Module):
    """A part that is wrapped alone, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = FSDP(nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())  # type: ignore[no-any-return]


def in_parts(rank: int, *made: Callable[[Any], Any]) -> Iterator[None]:
    """Optimizers of the parameters that each of `made` selects, which step in turns."""
    torch.manual_seed(0)
    model = FSDP(Parts())
    optimizers = [torch.optim.SGD(each(model), lr=0.1) for each in made]
    for step in range(STEPS):
        loss(model, rank, step).backward()
        optimizers[step % len(optimizers)].step()
        model.zero_grad()
        yield


def body(model: Any) -> Any:
    return model.module.body.parameters()


def head_group_beside_body(rank: int) -> Iterator[None]:
    def groups(model: Any) -> Any:
        return [{"params": body(model)}, {"params": model.module.head.parameters(), "lr": 1.0}]

    return in_parts(rank, groups)


def everything_that_the_module_lists(rank: int) -> Iterator[None]:
    return in_parts(rank, lambda model: model.module.parameters())


def in_turns(rank: int) -> Iterator[None]:
    """Two optimizers, each for some parameters."""
    return in_parts(rank, body, lambda model: [model._flat_param])


def frozen(rank: int) -> Iterator[None]:
    def trained(model: Any) -> Any:
        model._flat_param.requires_grad_(False)
        return body(model)

    return in_parts(rank, trained)


def partly_by_hand(rank: int) -> Iterator[None]:
    model = FSDP(Parts())
    optimizer = torch.optim.SGD(body(model), lr=0.1)
    while True:
        loss(model, rank).backward()
        optimizer.step()
        with torch.no_grad():
            model._flat_param.sub_(0.1 * model._flat_param.grad)
        yield


def some_by_choice(rank: int) -> Iterator[None]:
    """Of original parameters."""
    model = wrapped(use_orig_params=True)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "weight" in name], lr=0.1)
    while True:
        loss(model, rank).backward()
        optimizer.step()
        yield


def accumulating(rank: int, last_reduces: bool, **settings: Any) -> Iterator[None]:
    model = wrapped(**settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        with model.no_sync():
            loss(model, rank).backward()
            if not last_reduces:
                optimizer.step()  # a window is open
        if last_reduces:
            loss(model, rank).backward()
            optimizer.step()
        optimizer.zero_grad()
        yield


def unreduced(rank: int, world: int, *args: Any, **settings: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, patch.object(errors, "_warned", set()):
        warnings.simplefilter("always", errors.FlatFSDPWarning)
        for _ in zip(range(STEPS), accumulating(rank, *args, **settings), strict=False):
            pass
    return [str(each.message) for each in caught if "not averaged" in str(each.message)]


@pytest.mark.parametrize("orig", [True, False])
def test_a_step_on_gradients_that_were_not_reduced_is_reported_once(pool2: Run, orig: bool) -> None:
    (message,) = [each for found in pool2(unreduced, False, use_orig_params=orig) for each in found]
    assert message == (
        "SGD steps on gradients that are not averaged over ranks: they were accumulated under no_sync(), and no "
        "backward has reduced them, so each rank's shard depends on that rank's data alone. Run the last "
        "backward before a step outside of no_sync(), under fully_shard after set_requires_gradient_sync(True)"
    )
    assert pool2(unreduced, True, use_orig_params=orig) == [[], []]
    assert pool2(unreduced, False, use_orig_params=orig, sharding_strategy="NO_SHARD") == [[], []]


def reported(rank: int, world: int, program: Callable[..., Iterator[None]], **settings: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, patch.object(errors, "_warned", set()):
        warnings.simplefilter("always", errors.FlatFSDPWarning)
        for _ in zip(range(STEPS), program(rank, **settings), strict=False):
            pass
    return [str(each.message) for each in caught if "no optimizer steps" in str(each.message)]


def test_groups_by_names_that_match_nothing_are_reported_once(pool2: Run) -> None:
    (message,), others = pool2(reported, groups_by_name)
    assert others == []
    assert message == (
        "no optimizer steps on the parameters of this model: they received gradients in two backwards, and the AdamW "
        "that stepped between them does not hold any parameter with a gradient (2 of its 2 param groups are empty). "
        + OF_FLAT.format("0._flat_param, 2._flat_param")
    )


def test_flat_parameters_that_no_optimizer_has_beside_others_are_reported_once(pool2: Run) -> None:
    (message,), others = pool2(reported, head_group_beside_body)
    assert others == []
    assert message == (
        "no optimizer steps on some flat parameters of this model: they received gradients in two backwards, and the "
        "SGD that stepped between them holds other parameters (1 of its 2 param groups are empty). "
        + OF_FLAT.format("_flat_param")
    )


@pytest.mark.parametrize(
    "program",
    [
        everything_that_the_module_lists,
        in_turns,
        frozen,
        partly_by_hand,
        some_by_choice,
        groups_that_match,
        by_hand,
        by_hand_through_data,
        by_nobody,
        of_another_library,
        in_the_backward,
        accumulated,
        looked_at,
        game,
    ],
)
def test_what_else_leaves_an_optimizer_without_parameters_is_not(
    pool2: Run, program: Callable[..., Iterator[None]]
) -> None:
    assert pool2(reported, program) == [[], []]
