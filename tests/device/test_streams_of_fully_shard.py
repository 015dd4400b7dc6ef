"""Streams under `fully_shard` on a device that finds races: DTensors of rows, and tensors with gather hooks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatfsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from flatfsdp.engine.device.streams import Device, Stream
from tests.comm.test_communication import Block, Tower, forward
from tests.harness.fake import fake_world
from tests.harness.fake_device import FakeDevice
from tests.harness.gather_hooks import AsBfloat16, AsInt8, extend

pytestmark = pytest.mark.single_process

BF16, FP32 = torch.bfloat16, torch.float32
Kind = Callable[[torch.Tensor], Any]


@contextmanager
def device_of(world: int = 4, *, joined: bool = False) -> Iterator[FakeDevice]:
    with fake_world(world, joined=joined), FakeDevice() as device:
        yield device


def sharded(kind: Kind | None = None, *, mesh: tuple[int, ...] = (4,), **options: Any) -> Any:
    """`Tower`, its blocks units; weights of ``kind``."""
    model = Tower() if kind is None else extend(Tower(), kind)
    names = ("replicate", "shard")[-len(mesh) :]
    options["mesh"] = dist.init_device_mesh("cpu", mesh, mesh_dim_names=names)
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def train(model: Any, *, steps: int = 2) -> None:
    """Steps of several backwards, clipping and an evaluation between them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        for reduces, is_last in ((False, False), (True, False), (True, True)):
            model.set_requires_gradient_sync(reduces)
            model.set_is_last_backward(is_last)
            forward(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            forward(model)


KINDS = pytest.mark.parametrize("kind", [None, AsBfloat16, AsInt8], ids=["plain", "bfloat16", "int8"])


@KINDS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"mesh": (2, 2)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)},
        {"offload_policy": CPUOffloadPolicy()},
    ],
    ids=["defaults", "kept", "replicas", "bf16", "offload"],
)
def test_nothing_happens_too_early(kind: Kind | None, options: dict[str, Any]) -> None:
    with device_of() as device:
        model = sharded(kind, **options)
        train(model)
        del model
    assert device.races == []


@KINDS
def test_nothing_happens_too_early_where_small_units_are_joined(kind: Kind | None) -> None:
    with device_of(joined=True) as device:
        train(sharded(kind))
    assert device.races == []


@KINDS
def test_the_host_waits_for_nothing_in_a_settled_step(kind: Kind | None) -> None:
    with device_of() as device:
        model = sharded(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for settled in (False, False, True):
            if settled:
                device.host_waits.clear()
            forward(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert device.host_waits == [] and device.races == []


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


WAITS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "hooks after the optimizer": (
        lambda: patch.object(Stream, "follow_compute", nothing),
        r"(cat|div) on unshard may read before add_ on compute has written",
    ),
    "hooks after the gather": (
        lambda: patch.object(Device, "await_mark", nothing),
        r"(_to_copy|mul) on compute may read before \w+ on unshard has written",
    ),
    "memory after compute": (
        lambda: patch.object(Stream, "await_mark", nothing),
        "unsharded buffer goes back to unshard before",
    ),
}


@pytest.mark.parametrize("kind", [AsBfloat16, AsInt8], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("wait", WAITS)
def test_every_wait_is_needed(wait: str, kind: Kind) -> None:
    without, race = WAITS[wait]
    with device_of() as device, without():
        train(sharded(kind))
    assert any(re.search(race, found) for found in device.races), device.races


def test_memory_that_hooks_made_goes_back_in_order_with_compute() -> None:
    """And is found where it does not: here it is taken in the order of gathers."""
    from flatfsdp.engine.dtensor.extended_handle import OpaqueParam

    unpack = OpaqueParam.unpack

    def elsewhere(self: OpaqueParam, rows: Any, *, changed: bool) -> None:
        refilled = bool(self._seen)
        with device.stream(device.Stream(priority=1)) if refilled else nullcontext():
            for storage, size in self._inner:
                storage.resize_(size)
        unpack(self, rows, changed=changed)

    with device_of() as device:
        train(sharded(AsBfloat16), steps=1)
        assert device.races == []
        with patch.object(OpaqueParam, "unpack", elsewhere):
            train(sharded(AsBfloat16), steps=1)
    assert any("tensor's memory goes back to another before" in race for race in device.races), device.races
