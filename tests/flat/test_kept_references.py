"""References to parameters that programs keep: used in their unit's forward, after their model, after a failed wrap."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.errors import UsageError
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process


@pytest.fixture
def world() -> Iterator[None]:
    """A fake world of two ranks, this process the first."""
    with fake_world(2):
        yield


class Keeping(nn.Module):
    """Uses a kept reference to its weight inside its forward."""

    def __init__(self, use: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.kept = [self.inner.weight]
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        self.use(self.kept[0])
        return self.inner(x)


def written(weight: Tensor) -> None:
    weight.data = weight.new_zeros(8)


@torch.no_grad()
def scaled(weight: Tensor) -> None:
    weight.mul_(0.5)


@torch.no_grad()
def detached(weight: Tensor) -> None:
    weight.detach()


@pytest.mark.parametrize("use", [lambda weight: weight.data, written, scaled, detached])
@pytest.mark.parametrize("training", [True, False])
def test_a_kept_reference_is_refused_in_the_forward_of_its_unit(
    world: None, use: Callable[[Tensor], Any], training: bool
) -> None:
    net = Keeping(use)
    model = FullyShardedDataParallel(net, use_orig_params=True)
    before = net.kept[0].detach().clone()
    with torch.set_grad_enabled(training), pytest.raises(UsageError) as found:
        model(torch.ones(1, 4))
    assert "parameter 'inner.weight' of unit <root>" in str(found.value)
    assert "through a reference that was kept" in str(found.value)
    assert torch.equal(net.kept[0].detach(), before)
    net.use = len
    model(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("orig", [True, False])
def test_a_model_that_a_parameter_refers_to_is_collected(world: None, orig: bool) -> None:
    net = nn.Linear(4, 4)
    model = FullyShardedDataParallel(net, use_orig_params=orig)
    for parameter in model.parameters():
        parameter.owner = model  # type: ignore[attr-defined]
    model(torch.ones(1, 4)).sum().backward()
    gone = weakref.ref(model)
    del model, net, parameter
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "use",
    [
        lambda net: net(torch.ones(1, 4)),
        lambda net: net.weight.data,
        lambda net: net.weight.sum(),
        copy.deepcopy,
    ],
)
def test_a_module_of_a_deleted_model_is_refused_in_words(world: None, use: Callable[[Any], Any]) -> None:
    net = nn.Linear(4, 4)
    model = FullyShardedDataParallel(net)
    model(torch.ones(1, 4)).sum().backward()
    del model
    gc.collect()
    with pytest.raises(UsageError, match="belonged to a model that was deleted"):
        use(net)
    repr(net.weight)


def fails(module: nn.Module) -> None:
    raise ZeroDivisionError


def test_a_failed_wrap_whose_exception_is_kept_leaves_plain_parameters() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].to("meta")
    parameters = [*net[0].parameters()]
    with fake_world(1), pytest.raises(ZeroDivisionError) as kept:
        FullyShardedDataParallel(
            net,
            auto_wrap_policy={nn.Linear},
            use_orig_params=True,
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),  # leaves are other objects then
            param_init_fn=fails,
        )
    assert all(a is b for a, b in zip(parameters, net[0].parameters(), strict=True))
    assert not any(each._backward_hooks for each in parameters)
    net[0](torch.ones(1, 4)).sum().backward()
    assert [each.grad is not None for each in parameters] == [True, True]
    del kept


def test_a_term_over_a_parameter_that_was_frozen_since(world: None) -> None:
    model: Any = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True)
    weight = model.module.weight
    term = weight.square().sum()
    weight.requires_grad_(False)
    term.backward()  # as in torch: accumulated nowhere
    assert weight.grad is None


def test_a_gradient_set_on_an_unsharded_part_of_a_flat_parameter_is_refused(world: None) -> None:
    """Also by a rank whose shard has all of that parameter. Of original parameters it is the shard's gradient."""
    model: Any = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 6)), use_orig_params=False)
    assert model.module[0].bias.numel() == 1
    model.unshard()
    model.module[0].bias.grad = torch.ones(1)
    with pytest.raises(UsageError, match=r"parameter '0\.bias' of unit <root>: its \.grad was replaced"):
        model(torch.ones(1, 4))
