"""`parameter.data = value`, `parameter.grad.data = value` and `module.weight = nn.Parameter(value)` between steps and
between a forward and its backward, under all fronts."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.thorough import is_thorough, some
from tests.harness.three_fronts import FRONTS, sharded, unlike, whole_values

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Any:
        return x + self.b(torch.relu(self.a(x)))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 2))


def batches(steps: int) -> list[Tensor]:
    return list(torch.randn(steps, 12, 6, generator=torch.Generator().manual_seed(3)))


def probes(model: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        return model(x)


def scale(model: nn.Module, x: Tensor) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def put_aside(model: nn.Module, x: Tensor) -> None:
    """As moving averages are tried: the weights themselves are kept, and put back."""
    kept = [parameter.data for parameter in model.parameters()]
    for _ in range(2):
        for parameter in model.parameters():
            parameter.data = parameter.data * 3
        probes(model, x)
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data = value
        probes(model, x)


def probe_twice(model: nn.Module, x: Tensor) -> None:
    """A forward lies between taking the weights aside and replacing them."""
    probes(model, x)
    kept = [parameter.data for parameter in model.parameters()]
    probes(model, x)
    for parameter in model.parameters():
        parameter.data = parameter.data * 3
    probes(model, x)
    for parameter, value in zip(model.parameters(), kept, strict=True):
        parameter.data = value


def itself(model: nn.Module, x: Tensor) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data


def halve_gradients(model: nn.Module, x: Tensor) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data * 0.5


def halve_own_gradients(model: nn.Module, x: Tensor) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 2
            parameter.grad.data = parameter.grad.data * 0.25


AFTER_BACKWARD = (halve_gradients, halve_own_gradients, itself)
AFTER_STEP = (scale, put_aside, probe_twice, itself)


def train(model: nn.Module, how: Any, rank: int, world: int, **stepping: Any) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches(3):
        x = batch.chunk(world)[rank]
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        if how in AFTER_BACKWARD:
            how(model, x)
        optimizer.step()
        if how in AFTER_STEP:
            how(model, x)
    return model


def assigned(rank: int, world: int, strategies: tuple[Any, ...]) -> list[str]:
    lines = []
    for number, how in enumerate((*AFTER_BACKWARD, *AFTER_STEP)):
        expected = {name: p.detach() for name, p in train(net(), how, 0, 1).named_parameters()}
        for place, front in enumerate(FRONTS):
            for options in some(strategies[place // 2], 2, number + place):
                model = train(sharded(front, net(), (Block,), **options), how, rank, world)
                found = unlike(whole_values(front, model), expected)
                lines += [f"{how.__name__} {front} {options} {line}" for line in found]
    return lines


OF_WRAPPER = ({}, {"sharding_strategy": "SHARD_GRAD_OP"}, {"sharding_strategy": "NO_SHARD"}, {"layout": "rows"})
OF_LAYOUTS = OF_WRAPPER[0], OF_WRAPPER[-1]
OF_FULLY_SHARD = ({}, {"reshard_after_forward": False})


@pytest.mark.parametrize("world", [2, 3])
def test_assignments_take_effect(run: Run, world: int) -> None:
    # Three ranks differ in what is padded, which only the layouts decide: both of them, without the other strategies.
    strategies = (OF_WRAPPER, OF_FULLY_SHARD) if world == 2 or is_thorough() else (OF_LAYOUTS, OF_FULLY_SHARD[:1])
    for lines in run(world, assigned, strategies):
        assert not lines, "\n".join(lines)


def between(rank: int, world: int, front: str, options: dict[str, Any]) -> list[str]:
    """Other weights are tried between a forward and its backward, and the first ones put back: autograd of one process
    would go on with these, but a unit has one memory for both."""
    model, x = sharded(front, net(), (Block,), **options), batches(1)[0]
    texts, parameters = [], list(model.parameters())
    for _ in range(2):
        expected = probes(model, x)
        loss = model(x).square().mean()
        kept = [parameter.data for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.data * 3
        try:
            if torch.equal(probes(model, x), expected):
                texts.append("computed with the former weights")
        except UsageError as error:
            if "written to between forward and backward" not in str(error):
                texts.append(str(error))
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.data = value
        model.zero_grad()
        del loss
    return texts


@pytest.mark.parametrize(("front", "options"), [*((front, {}) for front in FRONTS), ("flat", OF_WRAPPER[1])])
def test_a_forward_between_does_not_compute_with_the_data_of_before(
    front: str, options: dict[str, Any], pool2: Run
) -> None:
    for texts in pool2(between, front, options):
        assert not texts, texts


def new_parameter(layer: nn.Linear) -> None:
    torch.manual_seed(1)
    layer.weight = nn.Parameter(torch.randn(2, 6))


def load_new_parameters(layer: nn.Linear) -> None:
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)


def replaced(rank: int, world: int) -> list[str]:
    """A parameter is replaced after a backward, whose gradients nobody drops, or which was without synchronization."""
    lines = []
    for change in new_parameter, load_new_parameters:
        for accumulates in False, True:
            expected = gradients_after(net(), change, accumulates, 0, 1)
            for front in FRONTS[1:]:
                model = sharded(front, net(), (Block,))
                found = gradients_after(model, change, accumulates, rank, world)
                lines += [f"{change.__name__} {accumulates} {front} {line}" for line in unlike(found, expected)]
    return lines


def gradients_after(model: Any, change: Any, accumulates: bool, rank: int, world: int) -> dict[str, Tensor]:
    inner = getattr(model, "module", model)
    for number, batch in enumerate(batches(4)):
        quietly = accumulates and not number % 2 and world > 1
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(not quietly)
        with model.no_sync() if quietly and hasattr(model, "no_sync") else nullcontext():
            model(batch.chunk(world)[rank]).pow(2).mean().backward()
        if number == 2:
            change(inner[2])
            inner[2].zero_grad()  # nothing: the parameter is new
    if world == 1:
        return {name: parameter.grad for name, parameter in model.named_parameters()}
    if inner is model:
        return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_a_new_parameter_has_no_gradient_of_the_one_before(pool2: Run) -> None:
    for lines in pool2(replaced):
        assert not lines, "\n".join(lines)


class Lasting(nn.Module):
    """Parameters whose memory is not in row-major order, and of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4).t())
        self.c = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.s = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Any:
        return (x @ self.w).sum() + self.c.sum() + self.s.sum()


def whole_and_parts(rank: int, world: int) -> list[str]:
    lines = []
    torch.manual_seed(1)
    plain = Lasting()
    new = {name: torch.randn(parameter.shape) for name, parameter in plain.named_parameters()}
    for front in ("original", "fully_shard"):
        for form in ("whole", "part"):
            model = sharded(front, copy.deepcopy(plain))
            if form == "part":  # taken from a model that has these values
                other = sharded(front, copy.deepcopy(plain))
                for name, parameter in other.named_parameters():
                    parameter.data = new[name]
                other(torch.ones(2, 4)).backward()
                parts = {n: (p.to_local() if front == "fully_shard" else p.data) for n, p in other.named_parameters()}  # type: ignore[operator]
            for name, parameter in model.named_parameters():
                parameter.data = new[name] if form == "whole" else parts[name].detach().clone()
            model(torch.ones(2, 4)).backward()
            lines += [f"{front} {form} {line}" for line in unlike(whole_values(front, model), new)]
    return lines


def test_whole_values_and_this_ranks_parts_are_taken(pool2: Run) -> None:
    for lines in pool2(whole_and_parts):
        assert not lines, "\n".join(lines)


def gradients_of_fully_shard(rank: int, world: int) -> list[str]:
    model = sharded("fully_shard", net(), (Block,))
    model(torch.ones(2, 6)).sum().backward()
    lines = []
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        for given in (value, torch.distributed.tensor.distribute_tensor(value, parameter.device_mesh)):  # type: ignore[attr-defined]
            parameter.grad = parameter.grad * 0  # type: ignore[operator]
            parameter.grad.data = given  # type: ignore[union-attr]
            if not torch.equal(parameter.grad.full_tensor(), value):  # type: ignore[union-attr]
                lines.append(f"{name}: {type(given).__name__}")
        parameter.grad.data = parameter.grad.to_local() * 2  # type: ignore[union-attr]
        if not torch.equal(parameter.grad.full_tensor(), value * 2):  # type: ignore[union-attr]
            lines.append(f"{name}: its part")
    return lines


def test_gradients_take_whole_values_replicas_and_parts(pool2: Run) -> None:
    for lines in pool2(gradients_of_fully_shard):
        assert not lines, lines


def refusals(rank: int, world: int, front: str) -> list[str]:
    texts = []
    values = [torch.ones(3, 3), torch.ones(8, 6, dtype=torch.float64)]
    if front == "fully_shard":  # otherwise torch's setter refuses it
        values.append(torch.ones(8, 6, device="meta"))
    for value in values:
        model = sharded(front, net())
        weight = model.get_parameter("0.a.weight")
        try:
            weight.data = value
            model(torch.ones(2, 6))
        except UsageError as error:
            texts.append(str(error))
        else:
            texts.append("nothing")
    return texts


@pytest.mark.parametrize("front", ["original", "fully_shard"])
def test_other_shapes_dtypes_and_devices_are_refused(pool2: Run, front: str) -> None:
    for texts in pool2(refusals, front):
        for text in texts:
            assert "a.weight" in text and "expected" in text, texts


def left_to_torch(rank: int, world: int) -> bool:
    """A DTensor parameter of another engine on the same mesh behaves as torch's."""
    model = sharded("fully_shard", net())
    parameter = model.get_parameter("0.a.weight")
    other = nn.Parameter(parameter.detach() * 1.0)  # type: ignore[arg-type]
    before = other.full_tensor()  # type: ignore[attr-defined]
    other.data = other.data * 2
    return torch.equal(other.full_tensor(), before)  # type: ignore[attr-defined]


def test_other_engines_parameters_keep_torchs_setter(pool2: Run) -> None:
    assert pool2(left_to_torch) == [True, True]


def transposed_on_one_rank(rank: int, world: int, front: str) -> list[str]:
    """Nothing is sharded: each rank's parameters are its own, as under DDP."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    model = sharded(front, copy.deepcopy(plain), sharding_strategy="NO_SHARD")
    with FullyShardedDataParallel.summon_full_params(model) if front == "flat" else nullcontext():
        weight = model.module.weight
        for each in (plain.weight, weight):
            each.data = each.data.t() if rank == 1 else each.data
    lines = []
    x = torch.randn(3, 4)
    expected, found = plain(x), model(x)
    if not torch.allclose(found, expected):
        lines.append("output")
    found.sum().backward()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        if not torch.equal(model.module.weight, plain.weight):
            lines.append("weight")
    return lines


@pytest.mark.parametrize("front", ["flat", "original"])
def test_a_transpose_on_one_rank_is_a_value(pool2: Run, front: str) -> None:
    assert pool2(transposed_on_one_rank, front) == [[], []]
