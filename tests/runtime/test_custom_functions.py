"""Weights in custom autograd Functions, of the unit that holds them or of another one: the gradients of one process, or
an error that names the parameter."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import FlatFSDPError
from tests.conftest import Run
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed

WIDTH = 4


class Product(torch.autograd.Function):
    """x @ weight.T, with all that its backward needs saved by autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class InTwoParts(torch.autograd.Function):
    """The same; what is saved is decided after the forward."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return x @ weight.T

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = Product.backward


class Kept(torch.autograd.Function):
    """The same; tensors are attributes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.x, ctx.weight = x, weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad @ ctx.weight, grad.T @ ctx.x


class KeptInTwoParts(torch.autograd.Function):
    """The same, set up after the forward."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return x @ weight.T

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.x, ctx.weight = inputs

    backward = Kept.backward


class OnlySaved(torch.autograd.Function):
    """Its forward does not read the weight, its backward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(weight)
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return grad @ weight, weight * grad.sum()


class OnlySavedInTwoParts(torch.autograd.Function):
    """The same, saved after the forward."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    backward = OnlySaved.backward


class ForItsInput(torch.autograd.Function):
    """Saves the weight for the gradient of its input alone."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return x @ weight.T

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad @ ctx.saved_tensors[0], None


class NeitherSavedNorRead(torch.autograd.Function):
    """Brings a gradient to a weight that it does not look at."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        return

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * 2.0, grad.sum() * torch.ones(WIDTH, WIDTH)


FUNCTIONS: list[Any] = [
    Product,
    InTwoParts,
    Kept,
    KeptInTwoParts,
    OnlySaved,
    OnlySavedInTwoParts,
    ForItsInput,
    NeitherSavedNorRead,
]
PLACES = "own", "before", "after"


class Layer(nn.Linear):
    """A layer that may compute by a custom Function."""

    function: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.function is None else self.function.apply(x, self.weight)


class Handing(nn.Module):
    """Hands the weight of `head`, a unit, to a custom Function: that unit itself, or this module, before the unit runs
    or afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), Layer(WIDTH, WIDTH, bias=False)
        self.function: Any = None
        self.place = "own"

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.body(x))
        if self.function is not None and self.place == "before":
            x = self.function.apply(x, self.head.weight)
        x = self.head(x)
        return self.function.apply(x, self.head.weight) if self.function is not None and self.place == "after" else x

    def use(self, function: Any, place: str) -> None:
        self.function, self.place = function, place
        head = next(each for each in self.modules() if isinstance(each, Layer))
        head.function = function if place == "own" else None


def sharded(module: Handing, front: str) -> nn.Module:
    if front != "fully_shard":
        return FullyShardedDataParallel(module, auto_wrap_policy={nn.Linear, Layer}, use_orig_params=front == "orig")
    for each in (module.body, module.head, module):
        flatfsdp.fully_shard(each)
    return module


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def wholes(model: nn.Module, front: str) -> list[Tensor]:
    if front == "fully_shard":
        return [each.full_tensor() for each in model.parameters()]  # type: ignore[operator]
    with FullyShardedDataParallel.summon_full_params(model):
        return [each.detach().clone() for each in model.parameters()]


def one_step(forward: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    for each in batches:
        (forward(each).square().mean() / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def outcomes(rank: int, world: int, front: str, function: Any) -> dict[str, str]:
    """By place and number of steps before: "right", or the error's class and words."""
    found = {}
    for place, steps in itertools.product(PLACES, (0, 2)):
        torch.manual_seed(0)
        one = Handing()
        module = copy.deepcopy(one)
        model = sharded(module, front)
        its, own = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, model))
        try:
            for number in range(steps + 2):
                if number == steps:
                    one.use(function, place)
                    module.use(function, place)
                one_step(one, its, [batch(each, number) for each in range(world)])
                one_step(model, own, [batch(rank, number)])
            torch.testing.assert_close(wholes(model, front), list(one.parameters()))
            said = "right"
        except (FlatFSDPError, RuntimeError, AssertionError, TypeError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        found[f"{place}, {steps}"] = said
    return found


IN_WORDS = {
    # A gradient for a weight that the Function did not look at is refused by autograd.
    "wrapper": "UsageError: .*'weight' of unit 'head'.* outside the forward of (its|that) unit"
    "|RuntimeError: Function NeitherSavedNorReadBackward returned an invalid gradient at index 1",
    # As under torch's, where weights are DTensors.
    "fully_shard": "RuntimeError: .* got mixed torch.Tensor and DTensor|UsageError: the .grad of 'weight' was replaced",
}


@pytest.mark.parametrize(
    ("front", "function"),
    [
        *(("orig", function) for function in FUNCTIONS),
        *(("flat", function) for function in some(FUNCTIONS, 2)),
        *(("fully_shard", function) for function in some(FUNCTIONS, 2, 1)),
    ],
)
def test_right_or_in_words(front: str, function: Any, pool2: Run) -> None:
    words = re.compile(IN_WORDS["fully_shard" if front == "fully_shard" else "wrapper"], re.DOTALL)
    for found in pool2(outcomes, front, function):
        for case, said in found.items():
            assert said == "right" or (words.match(said) and not case.startswith("own")), f"{case}: {said}"
