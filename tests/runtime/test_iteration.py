"""An iteration comes to rest, also where a forward and a backward inside of it fail together."""

from __future__ import annotations

import warnings
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel, ensure_unit_participation
from flatfsdp.errors import UsageError
from tests.harness.fake import fake_world
from tests.harness.inspect import held_by_units, is_busy, memory

pytestmark = pytest.mark.single_process


class Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("bad gradient")


class Inside(nn.Module):
    """Runs a backward inside its forward, which fails after gradients of the unit inside have come."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = FullyShardedDataParallel(nn.Linear(4, 4))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            self.unit(Refuse.apply(x.requires_grad_())).sum().backward()
        y: Tensor = self.unit(x)
        return y


@pytest.mark.parametrize("then", ["a forward", "a state dict"])
def test_what_a_failed_backward_inside_a_forward_has_left_is_brought_to_rest(then: str) -> None:
    with fake_world(2):
        model = FullyShardedDataParallel(Inside())
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
        rest = memory(model).held
        model.module.fails = True
        with pytest.raises(ValueError, match="bad gradient"):
            model(torch.ones(2, 4))
        model.module.fails = False
        assert memory(model).held != rest, "nothing is left to be brought to rest: the test shows nothing"
        if then == "a forward":
            with torch.no_grad():
                model(torch.ones(2, 4))
        else:
            model.state_dict()
        assert memory(model).held == rest
        model(torch.ones(2, 4)).sum().backward()


class InsideAPart(nn.Module):
    """Runs a backward while units that run in any order are gathered together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.part = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.early = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.early:
            self.first(x.detach()).sum().backward()
        x = self.part[1](x)
        if not self.early:
            self.first(x.detach()).sum().backward()
        y: Tensor = self.last(x)
        return y


def test_a_backward_inside_of_a_part_in_any_order_is_refused() -> None:
    with fake_world(2):
        model = FullyShardedDataParallel(InsideAPart(), auto_wrap_policy={nn.Linear})
        ensure_unit_participation(model.module.part, any_order=True)
        with pytest.raises(UsageError, match=r"a backward begins inside the forward of <root>, while unit 'part\.0'"):
            model(torch.ones(2, 4))
        model.module.early = True
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()


def test_units_hold_no_way_up_to_their_model() -> None:
    with fake_world(2):
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), auto_wrap_policy={nn.Linear})
        model(torch.ones(2, 4)).sum().backward()
        held = set().union(*held_by_units(model))
        assert {"FlatParamHandle", "Gradients", "Resources"} <= held, "nothing is followed: the test shows nothing"
        assert held.isdisjoint({"Model", "Iteration", "Backward", "ForwardDriver", "BackwardHooks"})


class Marked(torch.autograd.Function):
    """Its node is alive as long as the graph."""

    nodes: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Marked.nodes.add(ctx)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Passing(nn.Module):
    """Returns its second input as it is: `alone`, or with its output for both."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.linear, self.alone = nn.Linear(4, 4), alone

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return y if self.alone else (self.linear(x) + y, y)


class Around(nn.Module):
    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.first, self.unit = nn.Linear(4, 4), FullyShardedDataParallel(Passing(alone))

    def forward(self, x: Tensor) -> Tensor:
        y = Marked.apply(self.first(x))
        made = self.unit(y * 2, y)
        return made if self.unit.module.alone else made[0] + made[1]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_graphs_of_units_that_return_what_they_were_given_are_let_go(alone: bool, backward: bool) -> None:
    with fake_world(2):
        model = FullyShardedDataParallel(Around(alone))
        for _ in range(3):
            loss = model(torch.ones(2, 4)).sum()
            if backward:
                loss.backward()
            del loss
        with torch.no_grad():
            model(torch.ones(2, 4))
        assert not Marked.nodes


def test_a_rank_is_known_to_be_busy_in_a_forward_after_a_backward_to_be_differentiated_again() -> None:
    """Otherwise its watchdog does not end its wait for others that have parted."""
    with fake_world(2):
        model, found = FullyShardedDataParallel(nn.Linear(4, 4)), []
        model.module.register_forward_hook(lambda *_: found.append(is_busy(model)))
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
                model(torch.ones(2, 4)).sum().backward(create_graph=True)
        assert found == [True, True] and not is_busy(model)
