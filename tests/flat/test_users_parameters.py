"""Outside of forwards, backwards and `unshard()`, modules list the users' own parameters; gradients are found there."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import MixedPrecision
from flatfsdp.errors import UsageError
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2, rank=0):
        yield


class Tied(nn.Module):
    """A weight that two units hold; `nested`: the one that owns it runs inside of the other."""

    def __init__(self, *, nested: bool = False) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.first.weight
        self.nested = nested
        if nested:
            self.head.inner = self.first
            self.head.register_forward_pre_hook(lambda head, args: (head.inner(*args),))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(x if self.nested else self.first(x)))


def wrapped(net: nn.Module, **more: Any) -> Any:
    return FSDP(net, auto_wrap_policy={nn.Linear}, use_orig_params=True, **more)


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


# -- lists of parameters -----------------------------------------------------------------------------------------------


SETTINGS = pytest.mark.parametrize(
    "settings",
    [{}, {"sharding_strategy": "SHARD_GRAD_OP"}, {"mixed_precision": BF16}, {"sharding_strategy": "NO_SHARD"}],
    ids=str,
)


@SETTINGS
@pytest.mark.parametrize("nested", [False, True])
def test_tied_parameters_are_listed_between_forward_and_backward(settings: dict[str, Any], nested: bool) -> None:
    net = Tied(nested=nested)
    users = list(net.parameters())
    model = wrapped(net, **settings)
    outer = nn.Sequential(model)
    assert same(users, list(outer.parameters()))
    for _ in range(2):
        loss = outer(torch.ones(2, 4)).float().sum()
        assert same(users, list(outer.parameters())) and net.head.module.weight is users[0]
        outer.zero_grad()
        assert [each.grad for each in users] == [None] * len(users)
        loss.backward()
        assert same(users, list(outer.parameters()))
        with torch.no_grad():
            outer(torch.ones(2, 4))
        assert same(users, list(outer.parameters()))


# -- gradients while users have whole parameters -----------------------------------------------------------------------


def requested(**more: Any) -> tuple[Any, nn.Module, list[nn.Parameter]]:
    """A model after a backward, of which a user has then unsharded a unit; a module around it; and its parameters."""
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **more)
    users = list(model.parameters())
    model(torch.ones(2, 4)).float().sum().backward()
    for each in FSDP.fsdp_modules(model):
        each.unshard()
    return model, nn.Sequential(model), users


def test_zero_grad_of_a_module_around_the_model_while_it_is_unsharded() -> None:
    _, outer, users = requested()
    outer.zero_grad(set_to_none=False)
    assert [each.grad is not None for each in users] == [bool(each.numel()) for each in users]
    assert not any(each.grad.any() for each in users if each.grad is not None)
    outer.zero_grad()
    assert [each.grad for each in users] == [None] * 4


def test_gradients_are_clipped_and_measured_by_hand_while_units_are_unsharded() -> None:
    model, outer, users = requested()
    before = [each.grad.norm() for each in users if each.grad is not None]
    listed = [each.grad for each in outer.parameters()]
    assert [each.norm() for each in listed if each is not None] == before and before
    torch.nn.utils.clip_grad_value_(outer.parameters(), 1e-3)
    assert all(each.grad.abs().max() <= 1e-3 for each in users if each.grad is not None)
    for each in outer.parameters():
        each.grad = None
    assert [each.grad for each in users] == [None] * 4
    model(torch.ones(2, 4)).float().sum().backward()
    assert any(each.grad is not None for each in users) and same(users, list(outer.parameters()))


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether they have the same values, or shapes where fake reductions leave memory as it was (torch 2.11)."""
    is_defined = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11)
    return torch.equal(one, other) if is_defined else one.shape == other.shape


class Listing(nn.Linear):
    """Lists its parameters inside of its forward."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.listed: list[nn.Parameter] = []

    def forward(self, x: Tensor) -> Tensor:
        self.listed = [*self.parameters()]
        return super().forward(x)


@SETTINGS
@pytest.mark.parametrize("requests", [False, True])
def test_gradients_of_parameters_that_were_listed_earlier(settings: dict[str, Any], requests: bool) -> None:
    """Inside of a forward, or while they were unsharded: these lists show and drop the gradients of today."""
    net = Listing()
    model: Any = FSDP(net, use_orig_params=True, **settings)
    users = list(model.parameters())
    if requests:
        model.unshard()
        listed = list(model.parameters())
        model.reshard()
    loss = model(torch.ones(2, 4)).float().sum()
    listed = listed if requests else net.listed
    assert [each.grad for each in listed] == [None, None]
    loss.backward()
    found = [each.grad for each in users]
    assert any(each is not None for each in found)
    assert all(each.grad is grad for each, grad in zip(listed, found, strict=True))
    loss = model(torch.ones(2, 4)).float().sum()
    assert all(each.grad is grad for each, grad in zip(listed, found, strict=True))
    for each in listed:
        each.grad = None
    assert [each.grad for each in users] == [None, None]
    loss.backward()
    for each, grad in zip(users, found, strict=True):
        assert grad is None or equal(each.grad, grad)
    with torch.no_grad():  # accumulates
        total = [None if each.grad is None else 2 * each.grad for each in users]
    model(torch.ones(2, 4)).float().sum().backward()
    for each, grad in zip(users, total, strict=True):
        assert grad is None or equal(each.grad, grad)


@SETTINGS
@pytest.mark.parametrize("state", ["unsharded", "resharded"])
def test_a_listed_parameter_is_looked_at_after_its_model_was_deleted(settings: dict[str, Any], state: str) -> None:
    model: Any = FSDP(nn.Linear(4, 4), use_orig_params=True, **settings)
    model.unshard()
    listed = list(model.parameters())
    if state == "resharded":
        model.reshard()
    del model
    gc.collect()
    for each in listed:
        assert each.grad is None and "Parameter" in repr(each)
        each.grad = None
        if state == "unsharded":
            copy.deepcopy(each)


def test_a_gradient_that_is_assigned_while_a_unit_is_unsharded_is_the_shards() -> None:
    model, outer, users = requested()
    given = torch.full_like(users[3], 2.0)
    leaf = list(outer.parameters())[3]
    leaf.grad = given
    assert users[3].grad is given and leaf.grad is given
    with pytest.raises(UsageError, match=r"'weight' of unit '0': its .grad was replaced by a tensor of shape \(4, 4\)"):
        next(outer.parameters()).grad = torch.ones(4, 4)
    del leaf.grad
    assert users[3].grad is None
    model(torch.ones(2, 4)).float().sum().backward()


def test_an_optimizer_of_unsharded_parameters_is_refused() -> None:
    model, _, _ = requested()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UsageError, match=r"holds '0.weight', as modules list it after unshard\(\)"):
        FSDP.optim_state_dict(model, optimizer)
    model(torch.ones(2, 4)).float().sum().backward()
    with pytest.raises(
        UsageError, match="the optimizer holds parameter 'weight' of unit '0' \\(param group 0\\), as modules list it"
    ):
        optimizer.step()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_shard_is_refused_between_forward_and_backward_of_unsharded_units(strategy: str, kept: bool) -> None:
    """Also of a unit that stays whole: at no time between does it show the shard."""
    model, _, users = requested(sharding_strategy=strategy)
    loss = model(torch.ones(2, 4)).sum()
    with torch.no_grad(), pytest.raises(UsageError, match="reads parameter 'weight' of unit '0' outside the forward"):
        (users if kept else list(model.parameters()))[0].norm()
    with pytest.raises(UsageError, match=r"grad\(\) needs the gradients of parameter 'weight' of unit '0'"):
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    assert all(each.norm() >= 0 for each in users)
    with torch.no_grad():
        for each in FSDP.fsdp_modules(model):
            each.unshard()
        model(torch.ones(2, 4))
    assert all(each.norm() >= 0 for each in users)


class Assigning(nn.Linear):
    """Assigns its weight to another attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.again = self.weight
        return super().forward(x) @ self.again


def test_a_leaf_that_a_forward_assigns_is_refused_outside_of_it() -> None:
    model: Any = FSDP(Assigning(4, 4), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    for use in model.module.again.sum, model.state_dict, torch.optim.SGD(model.parameters(), lr=0.1).step:
        with pytest.raises(UsageError, match="parameter 'weight' of unit <root>"):
            use()


# -- parameters that are replaced --------------------------------------------------------------------------------------


def assigned(module: nn.Module, value: float) -> nn.Parameter:
    made = module.weight = nn.Parameter(torch.full((4, 4), value))
    return made


@SETTINGS
@pytest.mark.parametrize("summons", [False, True])
def test_a_parameter_assigned_between_forward_and_backward_is_taken(settings: dict[str, Any], summons: bool) -> None:
    """The backward has the weights of its forward; the next forward has the new ones."""
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **settings)
    users, inner = list(model.parameters()), model.module[0].module
    for step in range(2):
        if summons:
            with FSDP.summon_full_params(model):
                pass
        loss = model(torch.ones(2, 4)).float().sum()
        assigned(inner, 3.0 + step)
        loss.backward()
        model(torch.ones(2, 4)).float().sum().backward()
        assert same(users, list(model.parameters()))
        assert users[0].eq(3.0 + step).all()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_parameter_assigned_between_two_forwards_of_a_backward_is_refused(strategy: str) -> None:
    """The gradient of the new one would be lost."""
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), sharding_strategy=strategy)
    model(torch.ones(2, 4))
    made = assigned(model.module[0].module, 3.0)
    with pytest.raises(UsageError, match="unit '0': parameters were written to between forward and backward: weight"):
        model(torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()
    assert made.grad is None and all(each.eq(3.0).all() for each in list(model.parameters())[:1])


def test_a_parameter_assigned_in_a_backward_is_taken() -> None:
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    users, inner = list(model.parameters()), model.module[0].module
    output = model(torch.ones(2, 4))
    output.register_hook(lambda grad: (assigned(inner, 3.0), None)[1])
    output.sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    assert same(users, list(model.parameters())) and users[0].eq(3.0).all()


def test_a_parameter_assigned_while_a_unit_is_unsharded_is_taken() -> None:
    model, _, users = requested()
    assigned(model.module[0].module, 3.0)
    model(torch.ones(2, 4)).sum().backward()
    assert same(users, list(model.parameters())) and users[0].eq(3.0).all()


# -- inside of forwards ------------------------------------------------------------------------------------------------


class Summons(nn.Module):
    """Looks at the parameters of a unit inside of its own forward, and computes with one afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept: list[nn.Parameter] = []
        self.before = False

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            with FSDP.summon_full_params(self.second):
                assert self.kept[0].shape == (4, 4)
        with pytest.raises(UsageError, match="reads parameter 'weight' of unit 'second' outside the forward"):
            self.kept[0].sum()
        return self.second(self.first(x))


@pytest.mark.parametrize("training", [True, False])
def test_a_summon_inside_of_a_forward_leaves_parameters_guarded(training: bool) -> None:
    net: Any = Summons()
    net.kept = [net.second.weight]
    model = wrapped(net)
    for net.before in (False, True, True):
        with torch.set_grad_enabled(training):
            output = model(torch.ones(2, 4))
        if training:
            output.sum().backward()
        net.kept[0].sum()


class Grading(nn.Linear):
    """Assigns a gradient inside of its forward."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.assigns = True

    def forward(self, x: Tensor) -> Tensor:
        if self.assigns:
            self.weight.grad = torch.ones_like(self.weight)
        return super().forward(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("settings", [{}, {"sharding_strategy": "SHARD_GRAD_OP"}, {"mixed_precision": BF16}], ids=str)
@pytest.mark.parametrize("orig", [True, False])
def test_a_gradient_that_a_forward_assigns_is_refused(settings: dict[str, Any], training: bool, orig: bool) -> None:
    net = Grading()
    model = FSDP(net, use_orig_params=orig, **settings)
    with torch.set_grad_enabled(training):
        loss = model(torch.ones(2, 4)).float().sum()
    net.assigns = False
    if not training:
        loss = model(torch.ones(2, 4)).float().sum()
    with pytest.raises(UsageError, match=r"the \.grad of 'weight' of unit <root> was assigned inside of a forward"):
        loss.backward()
    model(torch.ones(2, 4)).float().sum().backward()
    assert any(each.grad is not None for each in model.parameters())


class Hooking(nn.Linear):
    """Registers hooks on the parameter that its forward computes with."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.handle: Any = None
        self.grads: list[tuple[Any, ...]] = []
        self.users = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        if self.handle is None:
            self.handle = self.weight.register_post_accumulate_grad_hook(self.final)
        return super().forward(x)

    def final(self, parameter: Tensor) -> None:
        self.grads.append((parameter is self.users[0], parameter.grad is self.users[0].grad, parameter.grad is None))


def test_a_hook_that_a_forward_registers_sees_the_sharded_gradient() -> None:
    net = Hooking()
    model = FSDP(net, use_orig_params=True)
    for steps in (1, 2):
        with model.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
        assert net.grads == [(True, True, False)] * steps
    net.handle.remove()
    model(torch.ones(2, 4)).sum().backward()
    assert len(net.grads) == 2


@SETTINGS
def test_hooks_of_a_frozen_parameter_run_when_it_is_trained_again(settings: dict[str, Any]) -> None:
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **settings)
    calls: list[torch.Size] = []
    weight = next(model.parameters())
    weight.register_hook(lambda grad: calls.append(grad.shape))
    for trained in (False, False, True, False, True):
        weight.requires_grad_(trained)
        model(torch.ones(2, 4)).float().sum().backward()
        assert calls == [(4, 4)] * trained
        calls.clear()


@SETTINGS
def test_hooks_that_a_backward_registers_before_it_reaches_their_unit_run(settings: dict[str, Any]) -> None:
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **settings)
    weight = next(model.parameters())
    shapes: list[torch.Size] = []
    final: list[Tensor] = []

    def register(grad: Tensor) -> None:
        if not shapes:
            weight.register_hook(lambda grad: shapes.append(grad.shape))
            weight.register_post_accumulate_grad_hook(lambda parameter: final.append(parameter.grad.clone()))

    for steps in (1, 2):
        output = model(torch.ones(2, 4)).float()
        output.register_hook(register)
        output.square().sum().backward()
        assert shapes == [(4, 4)] * steps
        assert len(final) == steps and weight.grad is not None and torch.equal(final[-1], weight.grad)
        model.zero_grad()


# -- recurrent modules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_modules_find_their_weights_unchanged(
    kind: type[nn.RNNBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every forward lays the weights out anew for cuDNN, in memory of its own."""
    model = FSDP(nn.Sequential(kind(4, 4)), use_orig_params=True)
    calls: list[int] = []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: calls.append(1))
    for _ in range(2):
        output, _ = model(torch.ones(2, 3, 4))
        output.sum().backward()
        inner = model.module[0]
        # Of holders it has no references, not even weak ones: these would forbid to swap them.
        assert inner._flat_weight_refs == [None] * len(inner._flat_weights_names)
    assert not calls
