"""Backwards that reach graphs over shards: refused in words in any step; and what looks alike, and works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from flatfsdp.errors import UsageError
from tests.harness.fake import fake_world
from tests.harness.fake_device import FakeDevice

pytestmark = pytest.mark.single_process

FULL, GRAD_OP, NO = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(autouse=True)
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    with fake_world(getattr(request, "param", 2)):
        yield


def wrapped(**options: Any) -> FullyShardedDataParallel:
    modules = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    return FullyShardedDataParallel(modules, auto_wrap_policy={nn.Linear}, **options)


def weights(model: nn.Module) -> list[Tensor]:
    return [each.weight for each in model.modules() if isinstance(each, nn.Linear)]


def squares(model: nn.Module) -> Tensor:
    """A penalty that autograd keeps the weights for."""
    return torch.stack([weight.square().sum() for weight in weights(model)]).sum()


def of_views(model: nn.Module) -> Tensor:
    """One for which it keeps none."""
    return torch.cat([weight.view(-1) for weight in weights(model)]).square().sum()


def one_step(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(2, 4)).sum()
    loss.backward()
    model.zero_grad()
    return loss


PENALTIES = pytest.mark.parametrize("penalty", [squares, of_views])


@PENALTIES
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("low", [None, LOW])
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP])
def test_a_penalty_before_a_later_forward(
    strategy: ShardingStrategy, low: MixedPrecision | None, keeps: bool, penalty: Callable[..., Tensor]
) -> None:
    """Also where the graph of the step before lives on, as that of a `loss` in a loop does."""
    model = wrapped(use_orig_params=True, sharding_strategy=strategy, mixed_precision=low)
    kept = [one_step(model) for _ in range(2)]
    if not keeps:
        kept.clear()
    loss = penalty(model) + model(torch.ones(2, 4)).sum()
    with pytest.raises(UsageError, match=r"parameter 'weight' of unit '\d' received a gradient of shape"):
        loss.backward()
    one_step(model)


@PENALTIES
def test_flattened_parameters_are_not_there_before_a_forward(penalty: Callable[..., Tensor]) -> None:
    model = wrapped(use_orig_params=False)
    one_step(model)
    with pytest.raises(UsageError, match=r"reads parameter 'weight' of unit '0' outside the forward of its unit"):
        penalty(model)


@PENALTIES
def test_a_penalty_before_a_forward_on_a_device(penalty: Callable[..., Tensor]) -> None:
    with FakeDevice():
        model = wrapped(use_orig_params=True)
        kept = [one_step(model) for _ in range(2)]
        loss = penalty(model) + model(torch.ones(2, 4)).sum()
        with pytest.raises(UsageError, match=r"parameter 'weight' of unit '\d'"):
            loss.backward()
    assert len(kept) == 2


def test_without_a_cast_no_shard_has_whole_parameters_before_a_forward() -> None:
    model = wrapped(use_orig_params=True, sharding_strategy=NO)
    kept = [one_step(model)]
    (squares(model) + model(torch.ones(2, 4)).sum() * 0.0).backward()
    for weight in weights(model):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, 2.0 * weight.detach() / 2)  # the fake world adds nothing up
    assert kept


@pytest.mark.parametrize("keeps", [True, False])
def test_with_a_cast_no_shard_has_others(keeps: bool) -> None:
    model = wrapped(use_orig_params=True, sharding_strategy=NO, mixed_precision=LOW)
    kept = [one_step(model)] if keeps else one_step(model).detach()
    loss = squares(model) + model(torch.ones(2, 4)).sum()
    with pytest.raises(UsageError, match=r"parameter 'weight' of unit '\d' received a gradient of shape"):
        loss.backward()
    del kept


def test_whole_parameters_before_a_forward() -> None:
    """A user who has requested them may compute with them."""
    model = wrapped(use_orig_params=True)
    kept = [one_step(model)]
    for each in FullyShardedDataParallel.fsdp_modules(model):
        each.unshard()
    penalty = of_views(model)
    (penalty + model(torch.ones(2, 4)).sum()).backward()
    assert kept


def test_a_penalty_that_no_backward_reaches() -> None:
    """For a log, for example."""
    model = wrapped(use_orig_params=True)
    kept = [one_step(model)]
    penalty = of_views(model)
    one_step(model)
    assert penalty.requires_grad
    assert kept


def test_an_older_graph_goes_on() -> None:
    """Graphs of steps before, to which nodes were added at rest, bring gradients of whole parameters."""
    model = wrapped(use_orig_params=True)
    first = model(torch.ones(2, 4))
    first.sum().backward(retain_graph=True)
    second = model(first * 2.0)
    second.sum().backward()


class Scale(torch.autograd.Function):
    """Uses a weight in one of several ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: str) -> Tensor:  # type: ignore[override]
        ctx.shape = tuple(weight.shape) if how == "shape" else (4, 4)
        if how == "values":
            weight.mul(2.0)
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * 2.0, torch.ones(ctx.shape), None


class Handing(nn.Module):
    """Hands the weight of `head`, a unit, to a custom Function, before that unit runs or afterwards."""

    how: str | None = None

    def __init__(self, *, before: bool) -> None:
        super().__init__()
        self.body, self.head, self.before = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), before

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.how is not None and self.before:
            x = Scale.apply(x, self.head.weight, self.how)  # through the wrapper
        x = self.head(x)
        return Scale.apply(x, self.head.weight, self.how) if self.how is not None and not self.before else x


@pytest.mark.parametrize(("before", "how"), [(True, "shape"), (False, "shape"), (True, "values")])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("orig", [True, False])
def test_a_weight_handed_to_a_function_of_another_unit(orig: bool, steps: int, before: bool, how: str) -> None:
    module = Handing(before=before)
    model = FullyShardedDataParallel(module, auto_wrap_policy={nn.Linear}, use_orig_params=orig)
    for _ in range(steps):
        one_step(model)
    module.how = how
    with pytest.raises(UsageError, match="'weight' of unit 'head'"):
        model(torch.ones(2, 4)).sum().backward()


# One rank, because a fake group of several leaves what is reduced uninitialized.
@pytest.mark.parametrize("world", [1], indirect=True)
def test_penalties_of_fully_shard_are_those_of_distributed_tensors() -> None:
    """As under torch's: gradients reach the sharded parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    for each in (*model, model):
        fully_shard(each)
    one_step(model)
    penalty: Any = sum(parameter.square().sum() for parameter in model.parameters())
    (penalty.full_tensor() + model(torch.ones(2, 4)).sum() * 0.0).backward()
    for parameter in model.parameters():
        own: Any = parameter.grad
        torch.testing.assert_close(own.to_local(), 2.0 * parameter.detach().to_local())  # type: ignore[attr-defined]
