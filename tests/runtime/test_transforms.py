"""Models inside of torch.func's transforms, torch.autograd.functional and forward-mode derivatives, against one
process: derivatives with respect to inputs, and training by losses that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd import functional as F
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.corners import full_gradients, joined

pytestmark = pytest.mark.distributed

FRONTS = ["wrapper", "flat", "SHARD_GRAD_OP", "fully_shard"]


class Net(nn.Module):
    """Units behind each other; the first and the last parameters are the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.middle = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 3))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x)))) * self.scale


def plain() -> Any:
    torch.manual_seed(0)
    return Net().double()


def sharded(front: str, **settings: Any) -> Any:
    net = plain()
    if front == "fully_shard":
        for module in [*net.middle, net]:
            flatfsdp.fully_shard(module)
        return net
    strategy = front if front.isupper() else "FULL_SHARD"
    return FullyShardedDataParallel(
        net, auto_wrap_policy={nn.Sequential}, sharding_strategy=strategy, use_orig_params=front != "flat", **settings
    )


def inputs(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 4, dtype=torch.float64, generator=generator)


def squared(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x).pow(2).sum()


def of_samples(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return vmap(grad(f))


def forward_mode(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: jvp(f, (x,), (x,))[1]


def dual(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        made: Tensor = forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    return made


# Of a model and an input, each by a tensor.
DERIVATIVES: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad": lambda f, x: grad(squared(f))(x),
    "grad_and_value": lambda f, x: torch.cat([each.flatten() for each in grad_and_value(squared(f))(x)]),
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones(2, 3, dtype=x.dtype))[0],
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "grad of samples": lambda f, x: vmap(grad(squared(f)))(x),
    "grad of grad": lambda f, x: grad(squared(grad(squared(f))))(x),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(squared(f))(x),
    "captured": lambda f, x: grad(lambda y: squared(f)(x * y))(torch.ones_like(x)),
    "functional.jacobian": lambda f, x: F.jacobian(f, x, create_graph=torch.is_grad_enabled()),
    "functional.jvp": lambda f, x: F.jvp(f, x, torch.ones_like(x), create_graph=torch.is_grad_enabled())[1],
    "functional.hvp": lambda f, x: F.hvp(squared(f), x, torch.ones_like(x), create_graph=torch.is_grad_enabled())[1],
    "vectorized": lambda f, x: F.jacobian(f, x, vectorize=True),
    "forward mode": lambda f, x: F.jacobian(f, x, vectorize=True, strategy="forward-mode"),
    "dual": dual,
}
# That are no part of a graph, or for which torch has no second derivatives.
OF_INPUTS_ONLY = {"vectorized", "forward mode"}


def derivatives(rank: int, world: int, front: str) -> list[str]:
    lines = []
    x, reference, model = inputs(rank), plain(), sharded(front)
    for name, derivative in DERIVATIVES.items():
        for enabled in True, False:
            with torch.set_grad_enabled(enabled):
                found, expected = derivative(model, x), derivative(reference, x)
            if not torch.allclose(found, expected, rtol=1e-10):
                lines.append(f"{name}: {found} instead of {expected}")
        if not torch.allclose(model(x), reference(x)):
            lines.append(f"after {name}: another output")
    return lines


@pytest.mark.parametrize("front", FRONTS)
def test_derivatives_by_inputs(front: str, pool2: Run) -> None:
    assert not joined(pool2(derivatives, front))


def training(rank: int, world: int, front: str) -> list[str]:
    """The gradient of every parameter, of a loss with the output and a derivative of it in it."""
    lines = []
    reference, model = plain(), sharded(front)
    for name, derivative in DERIVATIVES.items():
        if name in OF_INPUTS_ONLY:
            continue
        reference.zero_grad()
        for each in range(world):
            x = inputs(each)
            ((reference(x).sum() + derivative(reference, x).pow(2).sum()) / world).backward()
        model.zero_grad()
        x = inputs(rank)
        (model(x).sum() + derivative(model, x).pow(2).sum()).backward()
        found = gradients_of(model)
        for path, parameter in reference.named_parameters():
            if not torch.allclose(found[path], parameter.grad, rtol=1e-10):
                lines.append(f"{name}: {path} has {found[path]} instead of {parameter.grad}")
    return lines


def gradients_of(model: Any) -> dict[str, Any]:
    if isinstance(model, FullyShardedDataParallel):
        return full_gradients(model)
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("front", FRONTS)
def test_training_by_derivatives(front: str, pool2: Run) -> None:
    assert not joined(pool2(training, front))


def precision(rank: int, world: int) -> list[str]:
    """Casts of inputs and outputs, in a transform and in a backward."""
    x = inputs(rank).float()
    model = sharded("wrapper", mixed_precision=MixedPrecision(torch.bfloat16, cast_forward_inputs=True))
    with flatfsdp.detect_nonfinite(model):
        found = grad(squared(model))(x)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(squared(model)(x), x)
    return [] if torch.equal(found, expected) else [f"{found} instead of {expected}"]


def test_inputs_are_cast_and_looked_at_in_a_transform(pool2: Run) -> None:
    assert not joined(pool2(precision))


class Planned(Exception):
    """The exception that a hook raises."""


def raises(*args: Any) -> Any:
    raise Planned


def failures(rank: int, world: int, front: str) -> list[str]:
    """Forwards and backwards that fail inside of transforms of a model that has run before."""
    lines = []
    x, reference, model = inputs(rank), plain(), sharded(front)

    def refused_gradient(x: Tensor) -> Tensor:
        output = model(x)
        if output.requires_grad:
            output.register_hook(raises)
        return output.sum()

    def without_forward(x: Tensor) -> Tensor:
        hook = model.get_submodule("last").register_forward_pre_hook(raises)
        try:
            return squared(model)(x)
        finally:
            hook.remove()

    for f in refused_gradient, without_forward:
        for transform in grad, of_samples, forward_mode:
            if not torch.allclose(model(x), reference(x)):
                lines.append(f"{f.__name__}: another output")
            with suppress(Planned):
                transform(f)(x)
            if not torch.allclose(grad(squared(model))(x), grad(squared(reference))(x)):
                lines.append(f"{f.__name__}: another derivative")
    return lines


@pytest.mark.parametrize("front", FRONTS)
def test_failures_in_transforms_leave_a_usable_model(front: str, pool2: Run) -> None:
    assert not joined(pool2(failures, front))


def by_parameters(rank: int, world: int, front: str) -> list[str]:
    """`functional_call` inside of a transform is refused, and leaves the model as it was."""
    x, reference, model = inputs(rank), plain(), sharded(front)
    given = dict(model.named_parameters())
    for _ in "cold", "warm":
        with pytest.raises(UsageError, match=r"functional_call passed other tensors for .* to unit"):
            grad(lambda parameters: functional_call(model, parameters, x).sum())(given)
        if not torch.allclose(model(x), reference(x)):
            return ["another output"]
    return [] if list(dict(model.named_parameters())) == list(given) else ["other parameters"]


@pytest.mark.parametrize("front", FRONTS)
def test_derivatives_by_parameters_are_refused(front: str, pool2: Run) -> None:
    assert not joined(pool2(by_parameters, front))
