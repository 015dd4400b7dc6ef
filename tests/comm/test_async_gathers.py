"""Gathers on the caller's stream: waits, the stream that allocates, and that none is prefetched automatically."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.device.streams import Device
from flatfsdp.errors import ConfigTypeError, ConfigValueError, UsageError
from flatfsdp.wrap import ModuleWrapPolicy
from tests.comm.test_communication import NUMELS, Block, forward, padded, settled, story, tower, wrapped
from tests.device.test_streams import OPTIONS, device_of, named, nothing, train
from tests.harness import inspect
from tests.harness.fake import fake_world
from tests.harness.fake_device import AsyncWork
from tests.harness.thorough import some
from tests.runtime.test_schedule_events import evaluate, live, refused

pytestmark = pytest.mark.single_process

# Without automatic prefetching, which is refused.
LEFT_TO_USERS = [
    options
    for options in OPTIONS
    if not options.get("forward_prefetch") and options.get("backward_prefetch") not in ("BACKWARD_POST", "BACKWARD_MID")
]


def listed(model: FullyShardedDataParallel) -> FullyShardedDataParallel:
    """`model`, with gathers ahead by lists."""
    a, b, c = model.module.a, model.module.b, model.module.c
    a.set_modules_to_forward_prefetch([b, c])
    c.set_modules_to_backward_prefetch([b, a])
    return model


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
@pytest.mark.parametrize(
    ("strategy", "options", "lists"),
    [
        pytest.param(strategy, options, lists, id=f"{strategy}-{named(options)}{'-lists' * lists}")
        for row, strategy in enumerate(["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
        for column, options in enumerate(LEFT_TO_USERS)
        for lists in some([False, True], 2, row + column)  # all pairs of the three
    ],
)
def test_nothing_happens_too_early(strategy: str, lists: bool, options: dict[str, Any]) -> None:
    with device_of(8) as device:
        mesh = {"mesh": (2, 4)} if "HYBRID" in strategy else {}
        model = wrapped(strategy, **mesh, **options)
        model.set_unshard_async_op(True)
        train(listed(model) if lists else model, device)
        model.set_reshard_after_forward(2)
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        train(model, device, steps=1)
        assert live(model) - {"residual"} == {"shard"}
        del model
    assert device.races == []
    # No memory is another stream's, and compute is awaited by no stream of gathers.
    assert not any("unshard" in entry.replace("unsharded", "") for entry in device.log)


@pytest.mark.parametrize(
    ("without", "race"),
    [
        (lambda: patch.object(AsyncWork, "wait", nothing), "before _allgather_base_ on the backend has written"),
        (lambda: patch.object(Device, "block_host", nothing), "on the host may write before copy_ on compute is over"),
    ],
    ids=["the backend", "uploads"],
)
def test_every_wait_is_needed(without: Callable[[], Any], race: str) -> None:
    with device_of() as device, without():
        model = wrapped("FULL_SHARD", cpu_offload=True)
        model.set_unshard_async_op(True)
        loss = forward(model)
        inspect.drop_observers(model)  # else the race is with their reads after the backward
        loss.backward()
        with torch.no_grad(), device.by_host():
            for parameter in model.parameters():
                parameter.mul_(2)
    assert any(race in found for found in device.races), device.races


def test_a_forward_in_order_of_issue() -> None:
    with device_of() as device:
        model = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(nn.Linear(3, 3)), nn.Linear(3, 1)))
        model.set_unshard_async_op(True)
        with torch.no_grad():
            model(torch.randn(2, 3))
            device.log.clear()
            model(torch.randn(2, 3))
    gather = ["allocate unsharded on compute", "compute waits for the backend"]
    # Memory is freed as soon as the host has issued its last use: compute reaches its next user in order.
    assert device.log == [*gather, *gather, "free unsharded on compute", "free unsharded on compute"]
    assert device.races == []


def test_memory_goes_from_one_stream_to_the_other_between_iterations() -> None:
    with device_of() as device:
        model = wrapped("FULL_SHARD", reshard_after_forward=2)
        for on in (True, False, True):
            settled(model)
            loss = forward(model)
            model.set_unshard_async_op(on)
            assert live(model) == {"shard"}
            loss.backward()
            model.set_reshard_after_backward(False)
            forward(model).backward()
            model.set_unshard_async_op(not on)
            assert live(model) == {"shard"}
        train(model, device)
    assert device.races == []


def test_nothing_is_gathered_ahead_by_itself() -> None:
    kinds = ("gather", "forward", "backward", "reshard")
    with tower(backward_prefetch=None) as model:
        alone = story(model, lambda: forward(model).backward(), *kinds)
        by_lists = story(listed(model), lambda: forward(model).backward(), *kinds)
    with tower() as model:
        usual = story(model, lambda: forward(model).backward(), *kinds)
        assert usual != alone
        model.set_unshard_async_op(True)
        memory = inspect.memory(model)
        memory.reset_peaks()
        assert story(model, lambda: forward(model).backward(), *kinds) == alone
        block, *_, own = padded(NUMELS, 4)
        assert memory.peak("unsharded") == 4 * (own + block)
        assert story(listed(model), lambda: forward(model).backward(), *kinds) == by_lists != alone
        model.set_unshard_async_op(False)
        for each in (model.module.a, model.module.c):
            each.set_modules_to_forward_prefetch([])
            each.set_modules_to_backward_prefetch([])
        assert story(model, lambda: forward(model).backward(), *kinds) == usual


def test_requests_gather_ahead() -> None:
    with tower() as model:
        model.set_unshard_async_op(True)

        def run() -> None:
            model.module.c.unshard(async_op=True)
            evaluate(model)

        assert story(model, run, "gather") == "gather:c gather:root gather:a gather:b"


def test_what_gathers_ahead_by_itself_is_refused() -> None:
    with fake_world(4):
        for setting in ("forward_prefetch=True", "backward_prefetch=BACKWARD_POST", "backward_prefetch=BACKWARD_MID"):
            name, _, value = setting.partition("=")
            model = wrapped("FULL_SHARD", **{name: True if value == "True" else value})
            with refused(ConfigValueError, f"set_unshard_async_op: a Block inside was wrapped with {setting}, which"):
                model.set_unshard_async_op(True)
            model.set_unshard_async_op(False)
            assert inspect.schedule_in_words(model) == ""


def test_it_is_for_whole_models() -> None:
    with tower() as model:
        with refused(ConfigTypeError, "set_unshard_async_op: async_op: got 1 .int.. Accepted: True or False"):
            model.set_unshard_async_op(1)  # type: ignore[arg-type]
        with refused(UsageError, "of unit 'a' was called on a nested wrapper, .* on the outermost wrapper .Tower"):
            model.module.a.set_unshard_async_op(True)
        model.set_unshard_async_op(True)
        assert inspect.schedule_in_words(model) == "unshard_async_op=True in all units"
        twin: Any = copy.deepcopy(model)
        settled(twin)
        assert inspect.schedule_in_words(twin) == "unshard_async_op=True in all units"
        early = nn.Sequential(FullyShardedDataParallel(Block()), FullyShardedDataParallel(Block()))
        early[1].set_unshard_async_op(True)
        late = FullyShardedDataParallel(early)
        with refused(UsageError, "unit '1': set_unshard_async_op.. was called on a Block that an outer Sequential was"):
            forward(late)
        late.set_unshard_async_op(True)
        forward(late).backward()


def test_it_does_not_change_inside_a_backward() -> None:
    with tower() as model:
        model.module.between = lambda: model.set_unshard_async_op(True)
        with (
            pytest.warns(match="a backward failed"),
            refused(UsageError, "set_unshard_async_op of unit <root> was called inside a backward"),
        ):
            forward(model).backward()


def test_islands_and_policies_have_it_too() -> None:
    with fake_world(4):
        net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        model = FullyShardedDataParallel(
            net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=torch.bfloat16
        )
        model.set_unshard_async_op(True)
        units = inspect.units(model)
        assert len(units) == 3 and all(unit.schedule.unshard_async_op for unit in units)
