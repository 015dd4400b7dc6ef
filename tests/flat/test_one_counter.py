"""Leaves of a small unit share one version counter: which do, and what that means for errors and for gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp.engine.models.param_registry import disown
from flatfsdp.engine.models.walks import units_in
from flatfsdp.engine.runtime.backward import Backward
from flatfsdp.engine.state.full_params import unwrap
from flatfsdp.errors import UsageError
from tests.harness import inspect
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

ORIG = pytest.mark.parametrize("orig", [True, False])


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2, rank=0):
        yield


class Block(nn.Module):
    """Two layers, of whose parameters one may be `written` to in the forward."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.written: Callable[[Block], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.written is not None:
            with torch.no_grad():
                self.written(self)
        return self.down(self.up(x).relu())


def wrap(block: nn.Module, **more: Any) -> Any:
    return FSDP(nn.Sequential(block, nn.Linear(4, 1)), auto_wrap_policy={type(block)}, **more)


@ORIG
def test_leaves_of_a_small_unit_share_a_counter(orig: bool) -> None:
    block = Block()
    before = dict(block.named_parameters())
    model = wrap(block, use_orig_params=orig)
    assert inspect.counters_of(model) == [1, 1]
    assert all(block.get_parameter(name) is each for name, each in before.items())


@ORIG
def test_large_gradients_and_a_shard_that_is_the_whole_have_counters_of_their_own(orig: bool) -> None:
    with inspect.large_gradients():
        assert inspect.counters_of(wrap(Block(), use_orig_params=orig)) == [4, 2]
    assert inspect.counters_of(wrap(Block(), use_orig_params=orig, sharding_strategy="NO_SHARD")) == [4, 2]


def test_parameters_that_other_code_may_refer_to_keep_their_own_counters() -> None:
    class Own(nn.Parameter):
        """A user's class."""

    block, seen = Block(), []
    block.up.bias = Own(block.up.bias.detach())
    block.up.weight.register_hook(seen.append)
    held = weakref.ref(block.down.weight)
    model = wrap(block)
    assert inspect.counters_of(model) == [4, 1]  # the only one that may share has nobody to share with
    assert held() is block.down.weight and type(block.up.bias).__mro__[1] is not nn.Parameter
    model(torch.ones(2, 4)).sum().backward()
    assert len(seen) == 1


@ORIG
@pytest.mark.parametrize("training", [True, False])
def test_the_error_names_the_parameter_whose_values_show_the_write(orig: bool, training: bool) -> None:
    block = Block()
    model = wrap(block, use_orig_params=orig)
    block.written = lambda block: block.up.weight.mul_(3)
    with (
        torch.set_grad_enabled(training),
        pytest.raises(UsageError, match=r"unit '0': parameters were written to inside a forward: up.weight\. "),
    ):
        model(torch.ones(2, 4))


def test_the_error_names_all_if_no_value_on_this_rank_shows_the_write() -> None:
    block = Block()
    model = wrap(block)
    block.written = lambda block: block.down.bias.add_(1)  # on rank 1
    names = "up.weight, up.bias, down.weight, down.bias"
    with pytest.raises(UsageError, match=f"unit '0': parameters were written to inside a forward: one of {names}"):
        model(torch.ones(2, 4))


@ORIG
def test_gradients_moved_one_by_one_leave_the_parameters_alone(orig: bool) -> None:
    """Autograd cannot refuse only those parameters that they overwrite, and would refuse all that it has to read."""
    model = wrap(Block(), use_orig_params=orig)
    for _ in range(2):  # then gradients may take the memory of parameters
        model(torch.ones(2, 4)).sum().backward()
    with inspect.large_gradients(), patch.object(Backward, "collect"):  # nor are they picked up together
        model(torch.ones(2, 4)).sum().backward()


def test_parameters_that_are_given_back_have_counters_of_their_own() -> None:
    """As by a constructor that fails after it has made some units."""
    block = Block()
    model = FSDP(block)
    (unit,) = units_in(model)
    disown(unit)
    unwrap(unit)
    for parameter in block.parameters():
        before = [each._version for each in block.parameters()]
        torch.autograd.graph.increment_version(parameter)
        assert sum(each._version != version for each, version in zip(block.parameters(), before, strict=True)) == 1
