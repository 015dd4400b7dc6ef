"""A loss of tensors that a unit computes inside, as a hook takes them, and of none of its outputs: then the first
gradient of the backward is that of a parameter."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.three_fronts import sharded, unlike

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return x + self.b(torch.tanh(self.a(x)))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Block(), nn.Linear(6, 2))


# Where the parameters of the unit are whole from forward to backward.
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("original", {"sharding_strategy": "NO_SHARD"}),
    ("original", {"sharding_strategy": "SHARD_GRAD_OP"}),
    ("flat", {"sharding_strategy": "NO_SHARD"}),
    ("flat", {}),
    ("fully_shard", {"reshard_after_forward": False}),
]


def gradients(model: Any, kind: str, rank: int, world: int, *, inside: str) -> dict[str, Tensor]:
    """Of several backwards without `zero_grad()`; every second one is of a loss of what is computed inside."""
    inner = getattr(model, "module", model)
    block = getattr(inner[1], "module", inner[1])
    taken: list[Tensor] = []
    (inner[0] if inside == "root" else block.a).register_forward_hook(lambda m, args, output: taken.append(output))
    for step, batch in enumerate(torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(3))):
        quietly = kind == "accumulated" and step % 2 == 0 and step < 4
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(not quietly)
        with model.no_sync() if quietly and hasattr(model, "no_sync") else nullcontext():
            output = model(batch.chunk(world)[rank])
            (taken.pop().exp().mean() if step % 2 else output.exp().mean()).backward()
        if kind == "dropped":
            model.zero_grad()
    output = model(batch.chunk(world)[rank])
    taken.pop().square().mean().backward()
    if world == 1:
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    if inner is model:
        whole = {n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}
        return {n: torch.zeros(p.shape) if whole[n] is None else whole[n] for n, p in model.named_parameters()}  # type: ignore[misc]
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        return {n: torch.zeros(shapes[n]) if grad is None else grad.clone() for n, grad in found.items()}


def check(rank: int, world: int, inside: str) -> list[str]:
    lines = []
    for kind in "kept", "accumulated", "dropped":
        expected = gradients(net(), kind, 0, 1, inside=inside)
        for front, options in SETTINGS:
            model = sharded(front, net(), (Block,), **options)
            if inside == "unit" and not options:
                continue  # freed after its forward: autograd refuses what it saved of the weights
            if kind == "accumulated" and (front, options) == SETTINGS[0]:
                with pytest.raises(UsageError, match=r"the first gradient of this backward is .* '.*bias'"):
                    gradients(model, kind, rank, world, inside=inside)
                continue
            found = gradients(model, kind, rank, world, inside=inside)
            lines += [f"{kind} {front} {options} {line}" for line in unlike(found, expected)]
    return lines


@pytest.mark.parametrize("inside", ["root", "unit"])
def test_gradients_are_those_of_one_process(inside: str, pool2: Run) -> None:
    for lines in pool2(check, inside):
        assert not lines, "\n".join(lines)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two = Block(), Block()

    def forward(self, x: Tensor) -> Any:
        return self.one(x), self.two(x)


def check_beside(rank: int, world: int) -> list[str]:
    """The loss has an output of another unit, too, which begins the backward: nothing is added to a window."""
    whole, net = Pair(), Pair()
    model = FullyShardedDataParallel(net, auto_wrap_policy={Block}, sharding_strategy="NO_SHARD", use_orig_params=True)
    batches = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(3))
    for run, pair, parts in (model, net, world), (whole, whole, 1):
        taken: list[Tensor] = []
        getattr(pair.one, "module", pair.one).a.register_forward_hook(
            lambda m, args, output, to=taken: to.append(output)
        )
        for step, batch in enumerate(batches):
            with model.no_sync() if run is model and step < 2 else nullcontext():
                _, output = run(batch.chunk(parts)[rank if parts > 1 else 0])
                (taken.pop().exp().mean() + output.square().mean()).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    none = [name for name, grad in expected.items() if grad is None]
    assert none == ["one.b.weight", "one.b.bias"]
    assert all(found[name] is None for name in none)
    return unlike({n: found[n] for n in expected if n not in none}, {n: expected[n] for n in expected if n not in none})


def test_gradients_inside_a_unit_beside_an_output_of_another_one(pool2: Run) -> None:
    for lines in pool2(check_beside):
        assert not lines, "\n".join(lines)
