"""Less usual operations of programs for FSDP1: FSDP1's result is the reference."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import new_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import MixedPrecision
from flatfsdp.engine.config import fsdp1_mode
from flatfsdp.engine.features.forward_methods import explain
from flatfsdp.errors import AgreementError, ConfigValueError, UsageError
from tests.conftest import Run
from tests.harness.corners import full_parameters, joined, seeded
from tests.harness.fake import fake_world

pytestmark = pytest.mark.distributed

WIDTH, LR = 4, 0.1


# --- ranks that ignore different numbers of modules -------------------------------------------------------------------


class Ignored(nn.Module):
    """Multiplies by one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Uneven(nn.Module):
    """A list with `ignored` ignored modules in the middle, and a unit behind them."""

    def __init__(self, ignored: int) -> None:
        super().__init__()
        first, second, third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers = nn.Sequential(first, *(Ignored() for _ in range(ignored)), second, nn.Sequential(third))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers(x))


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def ignoring(rank: int, world: int, orig: bool, by_parameter: bool, sync: bool) -> list[str]:
    net = seeded(lambda: Uneven(rank + 1))
    modules = [module for module in net.modules() if isinstance(module, Ignored)]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    ignore: Any = {"ignored_states": parameters} if by_parameter else {"ignored_modules": modules}
    policy = {nn.Sequential}
    model: Any = FSDP(net, auto_wrap_policy=policy, use_orig_params=orig, sync_module_states=sync, **ignore)
    managed = [parameter for parameter in model.parameters() if not any(parameter is each for each in parameters)]
    optimizer = torch.optim.SGD(managed, lr=LR)

    plain = seeded(lambda: Uneven(0))
    reference = torch.optim.SGD(plain.parameters(), lr=LR)
    for step in range(3):
        optimizer.zero_grad()
        model(rows(rank, step)).square().sum().backward()
        optimizer.step()
        reference.zero_grad()
        torch.stack([plain(rows(r, step)).square().sum() for r in range(world)]).mean().backward()
        reference.step()
    found = [p for p in full_parameters(model).values() if not torch.equal(p, torch.eye(WIDTH))]
    expected = list(plain.parameters())
    same = len(found) == len(expected) and all(map(torch.allclose, found, expected))
    return [] if same else [f"rank {rank} has {found}, expected {expected}"]


@pytest.mark.parametrize(
    ("orig", "by_parameter", "sync"), [(True, False, False), (False, True, False), (True, True, True)]
)
def test_ranks_ignore_different_numbers_of_modules(orig: bool, by_parameter: bool, sync: bool, pool2: Run) -> None:
    assert not joined(pool2(ignoring, orig, by_parameter, sync))


# --- activation checkpointing -----------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its forwards, recomputations among them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.linear = 0, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x))


def checkpointed_after_wrapping(rank: int, world: int, orig: bool, reentrant: bool) -> list[str]:
    """Wrappers of modules that were wrapped before (`apply_activation_checkpointing` of a whole model) run."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Counting(), Counting())

    kind = torchs.CheckpointImpl.REENTRANT if reentrant else torchs.CheckpointImpl.NO_REENTRANT
    plain: Any = seeded(build)
    model: Any = FSDP(seeded(build), auto_wrap_policy={Counting}, use_orig_params=orig)
    torchs.apply_activation_checkpointing(
        model, partial(torchs.checkpoint_wrapper, checkpoint_impl=kind), lambda each: isinstance(each, Counting)
    )
    found = []
    for each in (model, copy.deepcopy(model)):
        counting = [module for module in each.modules() if isinstance(module, Counting)]
        before = [module.calls for module in counting]
        each(rows(rank, 0)).square().sum().backward()
        if [module.calls for module in counting] != [count + 2 for count in before]:
            found.append(f"{before} calls became {[module.calls for module in counting]}")
        plain.zero_grad()
        torch.stack([plain(rows(r, 0)).square().sum() for r in range(world)]).mean().backward()
        norm, expected = each.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        if not torch.allclose(norm, expected):
            found.append(f"norm {norm}, expected {expected}")
        if each.state_dict().keys() != plain.state_dict().keys():
            found.append(f"state dict of {[*each.state_dict()]}")
    return found


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_after_wrapping_recomputes(orig: bool, reentrant: bool, pool2: Run) -> None:
    assert not joined(pool2(checkpointed_after_wrapping, orig, reentrant))


# --- settings ---------------------------------------------------------------------------------------------------------


def setting_on_one_rank(rank: int, world: int) -> str:
    model: Any = FSDP(seeded(lambda: Uneven(0)), auto_wrap_policy={nn.Sequential})
    model(rows(rank, 0)).sum().backward()
    model.forward_prefetch = rank == 1
    try:
        model(rows(rank, 1))
    except AgreementError as error:
        return str(error)
    return "no error"


def test_a_setting_that_differs_between_ranks_is_an_error(pool2: Run) -> None:
    first, second = pool2(setting_on_one_rank)
    assert first == second
    assert "backward_prefetch=BACKWARD_PRE and forward_prefetch=True in <root>" in first


def full_precision(rank: int, world: int, as_fsdp1: bool) -> tuple[list[torch.dtype], list[str]]:
    with (
        patch.dict(os.environ, FSDP_USE_FULL_PREC_IN_EVAL="1"),
        patch.object(fsdp1_mode, "active", as_fsdp1),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        half = MixedPrecision(torch.float16, torch.float32, torch.float16)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        model: Any = FSDP(net, auto_wrap_policy={nn.Linear}, mixed_precision=half)
    dtypes = []
    model[0].module.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    for training in (True, False, True):
        model.train(training)(rows(rank, 0))
    assert model[0]._use_full_prec_in_eval is model._use_full_prec_in_eval is as_fsdp1
    return dtypes, [str(each.message) for each in caught if "IN_EVAL" in str(each.message)]


def test_full_precision_in_eval_by_the_environment(pool2: Run) -> None:
    low, whole = torch.float16, torch.float32
    assert pool2(full_precision, True) == [([low, whole, low], [])] * 2
    for dtypes, texts in pool2(full_precision, False):
        assert dtypes == [low] * 3
        assert len(texts) <= 1 and all("full_precision_in_eval=True" in each for each in texts)


# --- messages at the end of programs ----------------------------------------------------------------------------------


def ends(rank: int, world: int) -> dict[str, str]:
    texts = {}
    plain: Any = FSDP(seeded(lambda: Uneven(0)), use_orig_params=True)
    low: Any = FSDP(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).bfloat16()))
    programs: dict[str, Callable[[], Any]] = {
        "inside": lambda: plain.module(rows(rank, 0)),
        "forward": lambda: plain.module.forward(rows(rank, 0)),
        "dtypes": lambda: low(rows(rank, 0)),
        "users": lambda: plain(torch.ones(3, WIDTH + 1)),
    }
    for name, program in programs.items():
        try:
            program()
        except RuntimeError as error:
            texts[name] = explain(error)
    return texts


def test_what_a_program_ended_by_is_explained(pool2: Run) -> None:
    for text in pool2(ends):
        for name in ("inside", "forward"):
            assert (
                "'layers.0.weight' of unit <root> outside of the forward of its wrapper, where it is sharded"
            ) in text[name]
            assert "Call the wrapper, not the module inside" in text[name]
        assert "unit <root> in float32, unit <root> in bfloat16" in text["dtypes"]
        assert text["users"] == ""


def dtensors(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (world,))
    linear = nn.Linear(WIDTH, WIDTH)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
    try:
        FSDP(linear, sync_module_states=True)
    except UsageError as error:
        return str(error)
    return "no error"


def test_parameters_are_checked_before_their_values_are_sent(pool2: Run) -> None:
    for text in pool2(dtensors):
        assert text.startswith("'weight' is a DTensor on ") and "ranks 0, 1 are also among the ranks" in text


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
@pytest.mark.parametrize("device", ["cuda:0", torch.device("cuda", 1)])
def test_a_device_that_is_not_there(device: Any) -> None:
    with (
        fake_world(2),
        pytest.raises(ConfigValueError, match=r"device_id: got 'cuda:.', but this machine has no accel"),
    ):
        FSDP(nn.Linear(2, 2), device_id=device)


def what_the_constructor_warns_of(rank: int, world: int) -> list[list[str]]:
    alone = [new_group([each]) for each in range(world)][rank]
    texts = []
    for group in (None, alone):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            FSDP(nn.Linear(WIDTH, WIDTH), process_group=group, auto_wrap_policy={nn.Conv2d})
        texts.append([type(each.message).__name__ for each in caught])
    return texts


def test_what_all_ranks_would_warn_of_comes_from_the_lowest(pool2: Run) -> None:
    one = ["FlatFSDPWarning"]
    assert pool2(what_the_constructor_warns_of) == [[one, one], [[], one]]


# --- moves that move nothing ------------------------------------------------------------------------------------------


def moved_in_between(rank: int, world: int, strategy: str, orig: bool) -> tuple[bool, str]:
    """Whether gradients are those without any move, and the error of a cast there."""
    grads, texts = [], ""
    for moves in (False, True):
        net = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)))
        model = FSDP(net, auto_wrap_policy={nn.Linear}, sharding_strategy=strategy, use_orig_params=orig)
        for step in range(2):
            loss = model(rows(rank, step)).square().sum()
            if moves:
                model.to("cpu").float().cpu().to(torch.float32)
                model.module[0].to("cpu")
                with pytest.raises(UsageError) as raised:
                    model.double()
                texts = str(raised.value)
            loss.backward()
        with FSDP.summon_full_params(model, with_grads=True):
            grads.append([parameter.grad.clone() for parameter in model.parameters()])
        model.double()
        assert {each.dtype for each in model.state_dict().values()} <= {torch.float64, torch.int64}
    return all(map(torch.equal, *grads)), texts


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_moves_that_change_nothing_are_allowed_between_forward_and_backward(
    pool2: Run, strategy: str, orig: bool
) -> None:
    for right, texts in pool2(moved_in_between, strategy, orig):
        assert right
        assert "can be called only between iterations, but a forward here is still waiting for its backward" in texts
