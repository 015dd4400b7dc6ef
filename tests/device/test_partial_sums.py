"""Partial sums under `set_requires_all_reduce(False)`, on a device that finds races: what is added to the result of a
reduce-scatter is added on its stream, and has to be waited for where no all-reduce follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.engine.comm.process_group_transport import ProcessGroupTransport
from flatfsdp.engine.device.streams import PendingWork, Stream
from tests.comm.test_communication import WIDTH, forward, wrapped
from tests.harness.fake import fake_world
from tests.harness.fake_device import FakeDevice
from tests.harness.thorough import some

pytestmark = pytest.mark.single_process

STRATEGIES = ["NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


class Fails(Exception):
    pass


def _fail(grad: torch.Tensor) -> None:
    raise Fails


def failed_backward(model: FullyShardedDataParallel) -> None:
    """A backward that fails when all but the first unit are reduced."""
    x = torch.randn(3, WIDTH, requires_grad=True)
    x.register_hook(_fail)
    with pytest.raises(Fails):
        model(x).sum().backward()


def races(
    strategy: str,
    *,
    backwards: int,
    joined: bool = False,
    shape: tuple[int, int] = (2, 2),
    between: Callable[[FullyShardedDataParallel], None] = lambda model: None,
    **options: Any,
) -> list[str]:
    with fake_world(4, joined=joined), FakeDevice() as device:
        mesh = {"mesh": shape} if "HYBRID" in strategy else {}
        model = wrapped(strategy, **mesh, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model.set_requires_all_reduce(False)
            for _ in range(backwards):
                forward(model).backward()
                between(model)
            model.set_requires_all_reduce(True)
            forward(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    return device.races


@pytest.mark.parametrize(
    ("strategy", "joined", "original"),
    [
        (strategy, joined, original)
        for row, strategy in enumerate(STRATEGIES)
        for joined in (False, True)
        for original in some((False, True), 2, row + joined)  # all pairs of the three
    ],
)
def test_partial_sums_are_complete_before_they_are_used(strategy: str, joined: bool, original: bool) -> None:
    for backwards in (2, 3):
        assert races(strategy, backwards=backwards, joined=joined, use_orig_params=original) == []


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_failed_backward_between_them(strategy: str, joined: bool) -> None:
    for original in (False, True):
        found = races(strategy, backwards=2, joined=joined, between=failed_backward, use_orig_params=original)
        assert found == []


@pytest.mark.parametrize(
    "options",
    [
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
        {"mixed_precision": MixedPrecision(reduce_dtype=torch.float64)},
        {"mixed_precision": MixedPrecision(reduce_bits=8, reduce_error_feedback=True)},
        {"shape": (1, 4)},  # an axis of one replica, whose all-reduce does nothing
        {"shape": (4, 1)},
    ],
    ids=["bf16", "wide", "8 bits", "one replica", "one shard"],
)
def test_partial_sums_in_other_settings(options: dict[str, Any]) -> None:
    assert races("HYBRID_SHARD", backwards=2, joined=True, **options) == []


def test_gradients_that_come_late_are_added_to_them() -> None:
    """Two reductions of one handle in one backward: both are in the sum."""
    with fake_world(4), FakeDevice() as device:
        model = wrapped("HYBRID_SHARD", mesh=(2, 2), use_orig_params=True)
        model.set_requires_all_reduce(False)
        for _ in range(2):
            x = torch.randn(3, WIDTH)
            loss = model(x).sum() + model(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
    assert device.races == []


def test_the_wait_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    done = PendingWork()
    done.wait()
    monkeypatch.setattr(Stream, "pending", lambda stream, *keep: done)
    found = races("HYBRID_SHARD", backwards=2, joined=True)
    assert any("before add_ on reduce is over" in race for race in found), found


def test_an_all_reduce_that_fails_leaves_the_sum_to_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum was added, but what follows it raises: its memory goes back when the device has added it."""
    with fake_world(4, joined=True), FakeDevice() as device:
        model = wrapped("HYBRID_SHARD", mesh=(2, 2))
        model.set_requires_all_reduce(False)
        forward(model).backward()
        model.set_requires_all_reduce(True)

        def breaking(*args: Any) -> PendingWork:
            raise Fails

        with monkeypatch.context() as patched, pytest.raises(Fails):
            patched.setattr(ProcessGroupTransport, "all_reduce", breaking)
            forward(model).backward()
        forward(model).backward()
    assert device.races == []
