"""The attributes of parameters between a forward and its backward, and the effect of writes to them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp import CPUOffload, MixedPrecision
from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp.errors import UsageError
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Named(nn.Parameter):
    """A parameter of a user's class."""


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2, rank=0):
        yield


def small(kind: type[nn.Parameter] = nn.Parameter) -> nn.Module:
    """Three units and the root; of the last, this rank's shard of the weight has one element."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(1, 1), nn.PReLU())
    for module in net[:3]:
        module.weight = kind(module.weight.detach().clone())
    return net


def wrap(strategy: str = "FULL_SHARD", *, kind: type[nn.Parameter] = nn.Parameter, **more: Any) -> Any:
    return FSDP(small(kind), auto_wrap_policy={nn.Linear}, sharding_strategy=strategy, **more)


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 3)).float().sum()


# --- writes -----------------------------------------------------------------------------------------------------------


def replace(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 3


def in_place(parameter: nn.Parameter) -> None:
    parameter.data.mul_(3)


WRITES = pytest.mark.parametrize("write", [replace, in_place])
# Where parameters stay whole between forward and backward, apart from their shards.
KEPT = pytest.mark.parametrize(
    ("strategy", "precision"), [("SHARD_GRAD_OP", None), ("SHARD_GRAD_OP", BF16), ("NO_SHARD", BF16)]
)
KINDS = pytest.mark.parametrize("kind", [nn.Parameter, Named])


@KINDS
@WRITES
@pytest.mark.parametrize("orig", [True, False])
@KEPT
def test_writes_to_data_are_refused(
    world: None, strategy: str, precision: Any, orig: bool, write: Callable[[nn.Parameter], None], kind: Any
) -> None:
    model = wrap(strategy, kind=kind, mixed_precision=precision, use_orig_params=orig)
    weight = model.module[1].module.weight
    for step in range(2):
        loss = loss_of(model)
        write(weight)
        with pytest.raises(UsageError, match=r"unit '1': parameters were written to between .*: weight"):
            if step:
                loss.backward()
            else:
                loss_of(model)
    loss_of(model).backward()
    assert isinstance(weight, kind) and (type(weight) is kind or not orig)


@WRITES
def test_writes_to_the_root_are_refused(world: None, write: Callable[[nn.Parameter], None]) -> None:
    model = wrap()
    loss = loss_of(model)
    write(model.module[3].weight)
    with pytest.raises(UsageError, match=r"unit <root>: parameters were written to .*: 3\.weight"):
        loss.backward()


@WRITES
@pytest.mark.parametrize("then", ["step", "summon"])
def test_writes_are_refused_where_the_whole_is_freed(
    world: None, write: Callable[[nn.Parameter], None], then: str
) -> None:
    model = wrap("SHARD_GRAD_OP", use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model)
    write(model.module[1].module.weight)
    with pytest.raises(UsageError, match="unit '1': parameters were written to between forward and backward: weight"):
        if then == "step":
            optimizer.step()
        else:
            FSDP.summon_full_params(model).__enter__()
    optimizer.step()
    loss_of(model).backward()


@pytest.mark.parametrize("orig", [True, False])
def test_the_shard_that_is_the_whole_is_written_to(world: None, orig: bool) -> None:
    model = wrap("NO_SHARD", use_orig_params=orig)
    weight = model.module[1].module.weight
    before = weight.detach().clone()
    loss = loss_of(model)
    in_place(weight)
    loss.backward()
    torch.testing.assert_close(weight.detach(), before * 3)
    loss = loss_of(model)
    replace(weight)
    with pytest.raises(UsageError, match="unit '1': parameters were written to between forward and backward: weight"):
        loss.backward()


class Apart(nn.Module):
    """Two units with an output each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


@WRITES
@pytest.mark.parametrize("orig", [True, False])
@KEPT
@pytest.mark.parametrize("reached", ["first", "second"])
def test_writes_to_what_a_backward_does_not_reach_are_refused(
    world: None, strategy: str, precision: Any, orig: bool, write: Callable[[nn.Parameter], None], reached: str
) -> None:
    net: Any = Apart()
    model = FSDP(
        net,
        auto_wrap_policy={nn.Linear},
        sharding_strategy=strategy,
        mixed_precision=precision,
        use_orig_params=orig,
    )
    for _ in range(2):
        first, second = model(torch.ones(2, 3))
        write((net.second if reached == "first" else net.first).module.weight)
        with pytest.raises(UsageError, match=r"unit '\w+': parameters were written to between .*: weight"):
            (first if reached == "first" else second).float().sum().backward()
        assert [parameter.grad for parameter in model.parameters()] == [None] * len([*model.parameters()])
    loss_of_both(model).backward()


def loss_of_both(model: nn.Module) -> Tensor:
    first, second = model(torch.ones(2, 3))
    return (first + second).float().sum()


def test_data_replaced_in_the_shard_itself_and_not_reached_is_refused(world: None) -> None:
    net: Any = Apart()
    model = FSDP(net, auto_wrap_policy={nn.Linear}, sharding_strategy="NO_SHARD", use_orig_params=True)
    for weight in net.first.module.weight, net.second.module.weight:
        before = weight.detach().clone()
        in_place(weight)
        first, _ = model(torch.ones(2, 3))
        in_place(weight)
        first.sum().backward()
        torch.testing.assert_close(weight.detach(), before * 9)
        first, _ = model(torch.ones(2, 3))
        replace(net.second.module.weight)
        with pytest.raises(UsageError, match=r"unit 'second': parameters were written to between .*: weight"):
            first.sum().backward()


@WRITES
def test_writes_before_a_request_to_reshard_are_refused(world: None, write: Callable[[nn.Parameter], None]) -> None:
    model = wrap("SHARD_GRAD_OP", use_orig_params=True)
    loss = loss_of(model)
    write(model.module[1].module.weight)
    with pytest.raises(UsageError, match="unit '1': parameters were written to between forward and backward: weight"):
        model.module[1].reshard()
    with pytest.raises(UsageError, match="unit '1': parameters were written to between forward and backward: weight"):
        loss.backward()


@WRITES
def test_writes_between_two_backwards_of_one_graph_are_refused(
    world: None, write: Callable[[nn.Parameter], None]
) -> None:
    model = wrap(use_orig_params=True)
    x = torch.ones(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    write(model.module[1].module.weight)
    with pytest.raises(RuntimeError, match=r"unit '1': parameters were written to|modified by an inplace operation"):
        gradient.sum().backward()


class Replacing(nn.Linear):
    """Gives its weight other data in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_data_replaced_in_a_forward_is_refused(world: None, strategy: str) -> None:
    model = FSDP(nn.Sequential(Replacing(3, 3)), auto_wrap_policy={Replacing}, sharding_strategy=strategy)
    with pytest.raises(UsageError, match="unit '0': parameters were written to inside a forward: weight"):
        loss_of(model)


def test_writes_while_unsharded_on_request_are_refused(world: None) -> None:
    model = wrap(use_orig_params=True)
    model.module[1].unshard()
    in_place(model.module[1].module.weight)
    with pytest.raises(
        UsageError, match=r"unit '1': parameters were written to while they were unsharded by unshard\(\)"
    ):
        loss_of(model)
    loss_of(model).backward()


def test_data_assigned_to_itself_is_no_write(world: None) -> None:
    model = wrap("SHARD_GRAD_OP", use_orig_params=True)
    loss = loss_of(model)
    for parameter in model.parameters():
        parameter.data = parameter.data
        parameter.data = parameter.data.float()
    model.module[1].float()
    loss.backward()


def test_copies_are_of_the_usual_class(world: None) -> None:
    model = wrap("SHARD_GRAD_OP", use_orig_params=True, kind=Named)
    loss_of(model)
    weight, bias = model.module[1].module.weight, model.module[1].module.bias
    assert type(copy.deepcopy(weight)) is Named and type(copy.deepcopy(bias)) is nn.Parameter
    assert type(pickle.loads(pickle.dumps(bias))) is nn.Parameter


# --- shapes -----------------------------------------------------------------------------------------------------------


def answers(parameter: nn.Parameter) -> dict[str, Any]:
    """The attributes that describe a parameter."""
    return {
        "shape": parameter.shape,
        "size": parameter.size(),
        "size of a dimension": parameter.size(0),
        "numel": (parameter.numel(), parameter.nelement(), torch.numel(parameter), torch.numel(input=parameter)),
        "stride": parameter.stride(),
        "dimensions": (parameter.ndim, parameter.dim(), len(parameter)),
        "dtype": (parameter.dtype, parameter.is_floating_point(), parameter.element_size(), parameter.itemsize),
        "device": (parameter.device, parameter.get_device(), parameter.is_cuda),
        "contiguous": parameter.is_contiguous(),
        "bytes": parameter.nbytes,
        "leaf": (parameter.is_leaf, parameter.requires_grad, parameter.grad_fn),
        "class": isinstance(parameter, nn.Parameter),
    }


@KINDS
@pytest.mark.parametrize("precision", [None, BF16])
def test_a_resharded_parameter_is_described_as_its_shard(world: None, precision: Any, kind: Any) -> None:
    model = wrap(kind=kind, mixed_precision=precision, use_orig_params=True)
    units = [module for module in model.modules() if isinstance(module, FSDP) and module is not model]
    parameters = [parameter for unit in units for parameter in unit.parameters()]
    assert 1 in [parameter.numel() for parameter in parameters]  # which would broadcast
    before = [answers(parameter) for parameter in parameters]
    for _ in range(2):
        loss = loss_of(model)
        assert [answers(parameter) for parameter in parameters] == before
        for parameter in parameters:
            assert f"shape={tuple(parameter.shape)}" in repr(parameter) == f"{parameter}"
            assert pickle.loads(pickle.dumps(parameter)).shape == parameter.shape
            for use in USES:
                with pytest.raises(UsageError, match=r"reads parameter '(weight|bias)' of unit '\d'"):
                    use(parameter)
        loss.backward()
        assert [answers(parameter) for parameter in parameters] == before
        assert {type(parameter) for parameter in parameters} == {kind, nn.Parameter}


def elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"mixed_precision": BF16},
    {"cpu_offload": CPUOffload(offload_params=True)},
    {"reshard_after_forward": False},
    {"use_orig_params": False},
    {"use_orig_params": False, "mixed_precision": BF16},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_parameters_are_described_alike_at_any_time(world: None, strategy: str, settings: dict[str, Any]) -> None:
    model = wrap(strategy, kind=Named, **{"use_orig_params": True, **settings})
    count, before = elements(model), [answers(parameter) for parameter in model.parameters()]

    def check(when: str) -> None:
        assert elements(model) == count, when
        assert [answers(parameter) for parameter in model.parameters()] == before, when

    for _ in range(2):
        loss = loss_of(model)
        check("after a forward")
        with torch.no_grad():
            loss_of(model)
        check("after another one without gradients")
        loss.backward()
        check("after a backward")
    with model.no_sync():
        loss_of(model).backward()
    check("after a backward that reduces nothing")
    loss_of(model)
    loss_of(model).backward()
    check("after a backward of one of two forwards")
    x = torch.ones(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
    check("after a backward that will be differentiated")
    gradient.sum().backward()
    check("after its derivative")


@WRITES
@pytest.mark.parametrize("reached", [True, False])
def test_frozen_units_that_are_kept_are_described_alike(
    world: None, write: Callable[[nn.Parameter], None], reached: bool
) -> None:
    net: Any = Apart()
    net.first.requires_grad_(False)
    model = FSDP(net, auto_wrap_policy={nn.Linear}, use_orig_params=True)
    model.keep_frozen_unsharded()
    before = [answers(parameter) for parameter in model.parameters()]
    for _ in range(2):
        outputs = model(torch.ones(2, 3, requires_grad=reached))
        assert [answers(parameter) for parameter in model.parameters()] == before
        sum(outputs).sum().backward()
        assert [answers(parameter) for parameter in model.parameters()] == before
    outputs = model(torch.ones(2, 3, requires_grad=reached))
    write(net.first.module.weight)
    with pytest.raises(UsageError, match=r"unit 'first': parameters were written to between .*: weight"):
        sum(outputs).sum().backward()
    loss_of_both(model).backward()


@KINDS
def test_who_computes_with_a_parameter_that_is_its_own_leaf_gets_the_whole(world: None, kind: Any) -> None:
    model = wrap("NO_SHARD", kind=kind, use_orig_params=True)
    loss_of(model)
    weight, bias = model.module[0].module.weight, model.module[0].module.bias
    assert (weight * 2).shape == weight.sum(1, keepdim=True).expand(3, 3).shape == (3, 3)
    assert F.linear(torch.ones(2, 3), weight, bias).shape == (2, 3)
    assert type(weight * 2) is Tensor and (weight * 2).requires_grad and not weight.data.requires_grad
    assert weight.expand_as(weight).grad_fn.next_functions[0][0].variable is weight


@KEPT
def test_who_computes_with_the_shard_of_what_is_left_whole_is_refused(
    world: None, strategy: str, precision: Any
) -> None:
    model = wrap(strategy, mixed_precision=precision, use_orig_params=True)
    loss = loss_of(model)
    for use in USES:
        with pytest.raises(UsageError, match=r"reads parameter 'weight' of unit '0'"):
            use(model.module[0].module.weight)
    loss.backward()


@pytest.mark.parametrize("orig", [True, False])
def test_who_requests_the_whole_sees_its_shape(world: None, orig: bool) -> None:
    model = wrap("SHARD_GRAD_OP", use_orig_params=orig)
    loss = loss_of(model)
    model.module[0].unshard()
    assert model.module[0].module.weight.shape == (3, 3)
    loss.backward()
    assert model.module[0].module.weight.dim() == 1


USES: tuple[Callable[[nn.Parameter], Any], ...] = (
    lambda parameter: parameter + torch.ones(3, 4),
    lambda parameter: parameter.sum(),
    lambda parameter: parameter.tolist(),
    lambda parameter: torch.zeros_like(parameter),
    lambda parameter: nn.init.normal_(parameter),
    lambda parameter: nn.utils.parameters_to_vector([parameter]),
)


def test_what_lists_parameters_is_answered(world: None) -> None:
    model = wrap(use_orig_params=True)
    described = repr(model)
    optimizer = torch.optim.SGD([model.module[0].module.bias], lr=0.1)
    loss = loss_of(model)
    assert repr(model) == described
    optimizer.add_param_group({"params": list(model.module[1].parameters())})
    assert type(copy.deepcopy(model.module[1].module.weight)) is nn.Parameter
    held = nn.ParameterList(model.module[1].parameters())
    assert "of size" in repr(held)
    loss.backward()
    optimizer.step()


def test_parameters_outlive_their_model(world: None) -> None:
    model = wrap(use_orig_params=True)
    weight = model.module[1].module.weight
    loss_of(model)
    del model
    assert weight.dim() == 1 and (weight * 2).shape == weight.shape and type(weight) is nn.Parameter
