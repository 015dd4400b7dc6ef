"""A flat parameter between its uses."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import InternalError, UsageError
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process


def test_the_unsharded_form_that_is_not_there_is_refused_by_its_units_name() -> None:
    with fake_world(2):
        inner = FullyShardedDataParallel(nn.Linear(3, 2), use_orig_params=True)
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 3), inner), use_orig_params=True)
        model(torch.ones(1, 3))
        handle = inner._handle
        assert handle.unsharded.buffer is None
        with pytest.raises(InternalError, match=re.escape("unit '1': 'flat' of the unsharded parameters weight, bias")):
            _ = handle.unsharded.flat


class Lists(nn.Linear):
    """Records the names of the parameters that it lists in its forwards and backwards."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: list[list[str]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look()
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(self.look)
        return output * 2

    def look(self, grad: object = None) -> None:
        self.seen.append([name for name, _ in self.named_parameters()])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_modules_list_the_flat_parameter_except_while_they_compute(strategy: str) -> None:
    with fake_world(2):
        net = Lists()
        model = FullyShardedDataParallel(nn.Sequential(net), auto_wrap_policy={Lists}, sharding_strategy=strategy)
        flat, whole = ["_flat_param"], ["weight", "bias"]
        for _ in range(2):
            net.look()
            loss = model(torch.ones(2, 4)).sum()
            net.look()
            loss.backward()
            assert net.seen == [flat, whole, flat, whole]
            net.seen.clear()
        model[0].unshard()
        net.look()
        with torch.no_grad():
            model(torch.ones(2, 4))
        net.look()
        assert net.seen == [flat, whole, flat]


class Calls(nn.Module):
    """Calls its layer with other weights, as MAML does, between two calls with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = {name: 2.0 * each for name, each in self.layer.named_parameters()}
        assert list(doubled) == ["weight", "bias"]
        return self.layer(x) + torch.func.functional_call(self.layer, doubled, (x,)) + self.layer(x)


class Doubled(nn.Linear):
    """Computes with twice its weight."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return 2 * value if name == "weight" else value


class Twins(nn.Module):
    """Calls its layer, a clone of it with other parameters, it again with a replaced dictionary, and a deep copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        clone = layer.__new__(type(layer))
        clone.__dict__ = layer.__dict__.copy()
        clone._parameters = {name: 2.0 * each for name, each in layer._parameters.items()}  # type: ignore[misc]
        out = layer(x) + clone(x)
        own, layer._parameters = layer._parameters, clone._parameters
        out = out + layer(x)
        layer._parameters = own
        twin = copy.deepcopy(layer)
        assert [name for name, _ in twin.named_parameters()] == ["weight", "bias"]
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(3.0)
        return out + twin(x).detach()


@pytest.mark.parametrize("make", [Calls, lambda: nn.Sequential(Doubled(4, 4)), Twins])
def test_modules_compute_with_the_parameters_that_they_find(make: Callable[[], nn.Module]) -> None:
    plain = make()
    with fake_world(1):
        model = FullyShardedDataParallel(copy.deepcopy(plain))
        for _ in range(2):
            x = torch.randn(2, 4)
            out = model(x)
            assert torch.equal(out, plain(x))
            out.sum().backward()
            assert [name for name, _ in model.named_parameters()] == ["_flat_param"]


def test_a_module_finds_all_parameters_and_lists_those_of_their_time() -> None:
    with fake_world(2):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        weight, ignored = net[0].weight, net[1].weight
        model = FullyShardedDataParallel(net, ignored_states=[ignored])
        flat = model._flat_param
        for _ in range(2):
            assert [*net.parameters()] == [flat, ignored]
            assert net[0].weight is weight and net._flat_param is flat
            assert not net[0]._parameters and [*net[1]._parameters] == ["weight"]
            with FullyShardedDataParallel.summon_full_params(model):
                assert [name for name, _ in net.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
                assert net[0].weight is weight and net._flat_param is flat
        made = net[0].weight = nn.Parameter(torch.ones(4, 4))  # listed until it is taken over
        assert [*net[0].parameters()] == [made]
        model(torch.ones(2, 4))
        assert not net[0]._parameters and net[0].weight is weight


def test_an_attribute_that_hides_a_parameter_is_refused() -> None:
    with fake_world(2):
        net = nn.Sequential(nn.Linear(4, 4))
        model = FullyShardedDataParallel(net)
        net[0].__dict__["weight"] = torch.ones(4, 4)
        with pytest.raises(UsageError, match=r"'0\.weight' of unit <root> was changed after wrapping: it is a"):
            model(torch.ones(2, 4))


@pytest.mark.parametrize("way", ["copied", "pickled", "inner"])
def test_copies_list_what_the_model_lists(way: str) -> None:
    with fake_world(1):
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4)))
        if way == "inner":
            assert [name for name, _ in copy.deepcopy(model.module).named_parameters()] == ["_flat_param"]
            return
        twin = copy.deepcopy(model) if way == "copied" else pickle.loads(pickle.dumps(model))
        assert [name for name, _ in twin.named_parameters()] == ["_flat_param"]
        x = torch.randn(2, 4)
        for each in (model, twin):
            each(x).sum().backward()
        assert torch.equal(twin._flat_param.grad, model._flat_param.grad)
