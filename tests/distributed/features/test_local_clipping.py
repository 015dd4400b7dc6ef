"""Shards that each rank clips by a norm of its own: reported once, and nothing else that is done to gradients is taken
for it."""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import MixedPrecision, ShardedGradScaler, errors
from flatfsdp.engine.features import local_clipping
from flatfsdp.engine.watchdog.regions import current_watch
from tests.conftest import Run
from tests.harness.meshes import replicas_of_shards

STEPS = 3
FOUND = "ranks clip their gradients by different norms"
Edit = Callable[[Any, int], Any]  # of gradients, by the model and the rank


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def alike() -> nn.Module:
    """No parameter lies on two ranks of two."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def each(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def by_torch(model: nn.Module, rank: int) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def one_of_them(model: nn.Module, rank: int) -> Any:
    """The norm of rank 0 is small enough."""
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01 if rank else 100.0)


def by_largest(model: nn.Module, rank: int) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.001, float("inf"))


def by_ours(model: Any, rank: int) -> Any:
    return model.clip_grad_norm_(0.01)


def by_value(model: nn.Module, rank: int) -> Any:
    return nn.utils.clip_grad_value_(model.parameters(), 0.01)


def by_small_value(model: nn.Module, rank: int) -> Any:
    return nn.utils.clip_grad_value_(model.parameters(), 1e-9)


def noise(model: nn.Module, rank: int) -> None:
    for grad in each(model):
        grad.add_(torch.randn_like(grad) * 0.01)


def zeros_on_one(model: nn.Module, rank: int) -> None:
    for grad in each(model):
        grad.mul_(rank)


def halved_on_one(model: nn.Module, rank: int) -> None:
    for grad in each(model):
        grad.div_(2 - rank)


def larger_on_one(model: nn.Module, rank: int) -> None:
    for grad in each(model):
        grad.mul_(1 + 0.3 * rank)


def signs(model: nn.Module, rank: int) -> None:
    for grad in each(model):
        grad.sign_()


def layer_by_layer(model: nn.Module, rank: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name.startswith("0."):
            parameter.grad.mul_(0.3)


def nothing(model: nn.Module, rank: int) -> None:
    pass


def reported(
    rank: int,
    world: int,
    key: str,
    edit: Edit,
    build: Callable[[], nn.Module] = net,
    scaled: bool = False,
    hybrid: bool = False,
    **settings: Any,
) -> list[str]:
    """The warnings of a job that trains with an `edit` of its gradients before every step."""
    if hybrid:
        settings |= {"sharding_strategy": "HYBRID_SHARD", "device_mesh": replicas_of_shards()}
    with (
        warnings.catch_warnings(record=True) as caught,
        patch.object(local_clipping, "REPORTED", key),
        patch.object(errors, "_warned", set()),
    ):
        warnings.simplefilter("always", errors.FlatFSDPWarning)
        model = FSDP(build(), **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=1000.0, enabled=scaled)
        for step in range(STEPS + 1):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            if step < STEPS:
                edit(model, rank)
            else:  # the findings up to then are reported
                deadline = time.monotonic() + 20
                while current_watch()._errands and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert not current_watch()._errands
                dist.barrier()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [str(each.message) for each in caught if str(each.message).startswith(FOUND)]


def play(run: Run, world: int, edit: Edit, **settings: Any) -> list[str]:
    return [message for found in run(world, reported, uuid.uuid4().hex, edit, **settings) for message in found]


UNITS: dict[str, Any] = {"auto_wrap_policy": {nn.Linear}}


@pytest.mark.parametrize(
    ("world", "edit", "settings"),
    [
        (2, by_torch, {}),
        (2, by_torch, {"use_orig_params": True, **UNITS}),
        (2, by_torch, {"build": alike}),
        (2, by_torch, {"scaled": True}),
        (2, one_of_them, {}),
        (2, by_largest, {"use_orig_params": True}),
        (3, by_torch, UNITS),
        (3, by_torch, {"cpu_offload": True}),
        (4, by_torch, {"hybrid": True}),
        (
            2,
            by_torch,
            {"mixed_precision": MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)},
        ),
    ],
)
def test_norms_of_shards_are_reported_once(run: Run, world: int, edit: Edit, settings: dict[str, Any]) -> None:
    (message,) = play(run, world, edit, **settings)
    assert "torch.nn.utils.clip_grad_norm_() sees only the shards of one rank: call model.clip_grad_norm_()" in message


@pytest.mark.parametrize(
    ("edit", "settings"),
    [
        (by_ours, {}),
        (by_ours, {"scaled": True, "use_orig_params": True, **UNITS}),
        (nothing, {"scaled": True}),
        (by_value, {}),
        (by_value, {"build": alike}),
        (by_small_value, {"build": alike}),
        (noise, {"use_orig_params": True}),
        (zeros_on_one, {}),
        (halved_on_one, {}),
        (larger_on_one, {}),
        (signs, {"build": alike}),
        (layer_by_layer, {"use_orig_params": True}),
        (layer_by_layer, {"build": alike, "use_orig_params": True}),
        (by_torch, {"sharding_strategy": "NO_SHARD"}),
    ],
)
def test_what_else_happens_to_gradients_is_not(run: Run, edit: Edit, settings: dict[str, Any]) -> None:
    assert play(run, 2, edit, **settings) == []


def test_ranks_without_elements_count_for_nothing(run: Run) -> None:
    assert play(run, 3, by_torch, build=Scale) == []


class Scale(nn.Module):
    """Two elements: of three ranks one holds none, and the others one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


def test_one_rank_alone_clips_as_it_likes(run: Run) -> None:
    assert play(run, 1, by_torch) == []
