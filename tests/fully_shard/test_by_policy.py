"""`fully_shard` by a policy: the modules that become units, and their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatfsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision, fully_shard_by_policy
from flatfsdp.errors import ConfigTypeError, FlatFSDPWarning
from flatfsdp.wrap import CustomPolicy
from tests.harness import inspect

pytestmark = pytest.mark.single_process


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net(device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2))


def units(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def test_units_are_those_of_the_wrapper() -> None:
    for policy, expected in (
        ({nn.Linear}, ["", "0", "1.0", "2"]),
        (lambda module, recurse, nonwrapped_numel: recurse or type(module) is nn.Sequential, ["", "1"]),
        (None, [""]),
    ):
        assert units(fully_shard_by_policy(net(), policy)) == expected


def test_a_policy_gives_units_arguments_of_their_own() -> None:
    def chosen(module: nn.Module) -> bool | dict[str, Any]:
        return {"reshard_after_forward": False} if module is model[0] else type(module) is nn.Linear

    model = net()
    fully_shard_by_policy(model, CustomPolicy(chosen), forward_prefetch=True, reshard_after_forward=True)
    assert [inspect.unit(model[at]).schedule.reshard_after_forward for at in (0, 2)] == [False, True]
    with pytest.raises(ConfigTypeError, match=r"'sharding_strategy' is not an argument of fully_shard_by_policy"):
        fully_shard_by_policy(net(), CustomPolicy(lambda module: {"sharding_strategy": "NO_SHARD"}))


@pytest.mark.parametrize(
    ("module", "given", "words"),
    [
        ([nn.Linear(2, 2)], {}, "module: got .*Accepted: an nn.Module"),
        (nn.Linear(2, 2), {"policy": 3}, "auto_wrap_policy: got 3"),
        (nn.Linear(2, 2), {"mp_policy": "bf16"}, "mp_policy: got 'bf16'"),
        (nn.Linear(2, 2), {"param_init_fn": 3}, "param_init_fn: got 3"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sharded(module: Any, given: Any, words: str) -> None:
    policy = given.pop("policy", {nn.Linear})
    with pytest.raises(ConfigTypeError, match=words):
        fully_shard_by_policy(module, policy, **given)
    assert not isinstance(module, FSDPModule)


def test_batch_norms_are_in_full_precision_as_under_the_wrapper() -> None:
    precision = MixedPrecision(torch.bfloat16, torch.float32, buffer_dtype=torch.bfloat16)
    outputs, models = [], []
    for make in (FullyShardedDataParallel, fully_shard_by_policy):
        torch.manual_seed(0)
        with pytest.warns(FlatFSDPWarning, match="become units of their own in full precision"):
            if make is FullyShardedDataParallel:
                model: Any = make(net(), auto_wrap_policy={nn.Linear}, mixed_precision=precision, layout="rows")
            else:
                model = make(net(), {nn.Linear}, mp_policy=precision)
        models.append(model)
        outputs.append(model(torch.ones(3, 3)))
    assert units(models[1]) == ["", "0", "1.0", "1.1", "2"]
    assert torch.equal(*outputs) and outputs[0].dtype == torch.bfloat16
    norms = []
    for model, output in zip(models, outputs, strict=True):
        output.float().square().sum().backward()
        norms.append(model.clip_grad_norm_(0.1))
    assert torch.equal(*norms)


def test_values_from_the_meta_device_are_those_of_the_wrapper() -> None:
    made = []
    for make in (
        lambda module: FullyShardedDataParallel(module, auto_wrap_policy={nn.Linear}, use_orig_params=True),
        lambda module: fully_shard_by_policy(module, {nn.Linear}),
    ):
        torch.manual_seed(3)
        model = make(net("meta"))
        made.append([getattr(each, "full_tensor", each.detach)().flatten() for each in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*made, strict=True)) and len(made[0]) == 8


def test_clipping_reaches_gradients_while_modules_hold_unsharded_parameters() -> None:
    model = fully_shard_by_policy(net(), {nn.Linear})
    parameters: list[Any] = list(model.parameters())
    model(torch.ones(3, 3)).square().sum().backward()
    before = torch.stack([each.grad.full_tensor().norm() for each in parameters]).norm()
    model(torch.ones(3, 3))  # without a backward
    torch.testing.assert_close(model.clip_grad_norm_(0.1), before)
    after = torch.stack([each.grad.full_tensor().norm() for each in parameters]).norm()
    torch.testing.assert_close(after, torch.tensor(0.1), rtol=1e-4, atol=1e-6)
