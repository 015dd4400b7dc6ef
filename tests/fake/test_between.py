"""What parameters answer between a forward and its backward, and what becomes of writes to them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import MixedPrecision
from flatfsdp.errors import UsageError
from tests.harness.fake import fake_world

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
    assert type(weight) is kind


@WRITES
def test_writes_to_the_root_are_refused(world: None, write: Callable[[nn.Parameter], None]) -> None:
    model = wrap()
    loss = loss_of(model)
    write(model.module[3].weight)
    with pytest.raises(UsageError, match=r"unit '<root>': parameters were written to .*: 3\.weight"):
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
    with pytest.raises(UsageError, match=r"unit '1': parameters were written to while unshard\(\) showed them whole"):
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
    """What describes a parameter."""
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
            assert parameter.untyped_storage().nbytes() == 0 and parameter.data_ptr() == 0
            assert f"shape={tuple(parameter.shape)}" in repr(parameter) == f"{parameter}"
            assert pickle.loads(pickle.dumps(parameter)).shape == parameter.shape
            for use in USES:
                with pytest.raises(UsageError, match=r"reads parameter '(weight|bias)' of unit '\d'"):
                    use(parameter)
        loss.backward()
        assert [answers(parameter) for parameter in parameters] == before
        assert {type(parameter) for parameter in parameters} == {kind, nn.Parameter}


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
    assert weight.dim() == 1
