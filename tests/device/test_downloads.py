"""Gradients of offloaded parameters on their way to the host, during the backward, on a device that finds races."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, detect_nonfinite
from flatfsdp.engine.device import streams as device
from flatfsdp.engine.device.streams import Device, PendingWork, Stream
from flatfsdp.errors import NonFiniteError
from tests.comm.test_communication import UNITS, WIDTH, forward, settled, wrapped
from tests.harness import inspect
from tests.harness.fake import fake_world
from tests.harness.fake_device import FakeDevice

pytestmark = pytest.mark.single_process

PINNED, PAGEABLE = CPUOffload(True), CPUOffload(True, pin_memory=False)


@contextmanager
def offloaded(strategy: str = "FULL_SHARD", **options: Any) -> Iterator[tuple[FullyShardedDataParallel, FakeDevice]]:
    with fake_world(4), FakeDevice() as fake:
        if "HYBRID" in strategy:
            options["mesh"] = (2, 2)
        options.setdefault("cpu_offload", PINNED)
        model = wrapped(strategy, **options)
        settled(model)
        yield model, fake


def story(model: FullyShardedDataParallel) -> str:
    """Reductions, downloads and the end of a step, as they are issued."""
    trace = inspect.events(model)
    download, wait = Stream.download, Device.block_host

    def downloading(its_stream: Stream, tensor: Tensor) -> Any:
        trace.record("download", its_stream.name)
        return download(its_stream, tensor)

    def waiting(fake: Device, event: Any) -> None:
        if event is not None:
            trace.record("wait", event.stream.name)
        wait(fake, event)

    with patch.object(Stream, "download", downloading), patch.object(Device, "block_host", waiting):
        loss = forward(model)
        with trace.listening() as events:
            loss.backward()
    kinds = ("reduce", "download", "wait", "end")
    return " ".join(f"{event.kind}:{event.unit or 'root'}" for event in events if event.kind in kinds)


def test_downloads_run_beside_the_backward_and_the_host_waits_once() -> None:
    with offloaded() as (model, fake):
        assert story(model) == (
            # Each goes when its reduction's memory is needed; the host waits for its gradients, then for its shards.
            "reduce:c reduce:b download:reduce reduce:a download:reduce reduce:root download:reduce download:reduce "
            "wait:reduce wait:unshard end:root"
        )
    assert fake.races == []


def test_pageable_memory_is_copied_to_at_the_end() -> None:
    """The host would be kept in the middle of the backward."""
    with offloaded(cpu_offload=PAGEABLE) as (model, fake):
        assert story(model) == "reduce:c reduce:b reduce:a reduce:root wait:unshard end:root"
    assert fake.races == []


def test_partial_sums_stay_where_they_are() -> None:
    with offloaded("HYBRID_SHARD") as (model, fake):
        model.set_requires_all_reduce(False)
        assert "download" not in story(model)
        model.set_requires_all_reduce(True)
        assert story(model).count("download") == UNITS
    assert fake.races == []


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("mixed", [None, MixedPrecision(torch.bfloat16, torch.float32)], ids=["float32", "bfloat16"])
def test_the_host_finds_what_was_downloaded(strategy: str, mixed: MixedPrecision | None) -> None:
    def races() -> list[str]:
        with offloaded(strategy, mixed_precision=mixed) as (model, fake):
            for _ in range(2):
                model.zero_grad()
                forward(model).backward()
                with fake.by_host():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.grad.mul_(2)
        return fake.races

    assert races() == []
    with patch.object(Device, "block_host", lambda device, event: None):
        its_stream = "reduce" if strategy == "FULL_SHARD" else "replicate"  # that of the last stage
        assert any(f"mul_ on the host may write before copy_ on {its_stream} is over" in race for race in races())


def test_what_a_hook_makes_of_a_sum_is_downloaded() -> None:
    with offloaded() as (model, fake):
        model.set_all_reduce_hook(lambda total: total.mul_(3))
        assert story(model).count("download") == UNITS
    assert fake.races == []


def test_detect_nonfinite_reads_gradients_that_are_on_their_way_to_the_host() -> None:
    """They are scaled on the stream of their reduction."""
    with offloaded() as (model, fake), detect_nonfinite(model), suppress(NonFiniteError):
        forward(model).backward()  # a fake group leaves what it reduces uninitialized
    assert fake.races == []


class Fails(Exception):
    pass


@pytest.mark.parametrize("patient", [True, False])
def test_a_failed_backward_gives_no_memory_back_before_its_download(patient: bool) -> None:
    def fail(total: Tensor) -> None:
        raise Fails

    with offloaded() as (model, fake):
        model.set_all_reduce_hook(fail)  # on the root's gradients, the last: the others are on their way to the host
        with pytest.raises(Fails):
            forward(model).backward()
        model.set_all_reduce_hook(None)
        with nullcontext() if patient else patch.object(PendingWork, "wait", _impatient):
            forward(model)
    early = [race for race in fake.races if "goes back to" in race and "copy_ on reduce is over" in race]
    assert bool(early) is not patient, fake.races


def _impatient(pending: PendingWork, *, wait: Any = PendingWork.wait) -> None:
    """`PendingWork.wait` that lets a download's tensors go at once."""
    if len(pending._keep) == 2 and pending._keep[0].shape == pending._keep[1].shape:
        pending._event = None
    wait(pending)


def test_page_locked_memory_is_taken_for_every_gradient() -> None:
    with patch.object(device, "pinned_like", wraps=device.pinned_like) as taken, offloaded() as (model, _):
        taken.reset_mock()
        forward(model).backward()
        shards = sorted(flat.shard.numel() for flat in inspect.flat_params(model))
        assert sorted(call.args[0].numel() for call in taken.call_args_list) == shards


def test_on_a_cpu_nothing_is_downloaded() -> None:
    with patch.object(Stream, "download", side_effect=AssertionError("the host is the stream")), fake_world(4):
        settled(wrapped("FULL_SHARD", cpu_offload=PINNED))


class Twice(nn.Module):
    """Its weight's gradient comes once for each of two segments that are recomputed in tasks of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.linear, x, use_reentrant=True)
        return x


@pytest.mark.parametrize("mixed", [None, MixedPrecision(torch.bfloat16, torch.bfloat16)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("body", [Twice, lambda: nn.Linear(WIDTH, WIDTH)], ids=["late gradients", "one each"])
def test_values_are_those_without_offload(body: Any, mixed: MixedPrecision | None) -> None:
    def gradients(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        with fake_world(1), FakeDevice() as fake:
            model = FullyShardedDataParallel(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), body()),
                auto_wrap_policy={nn.Linear},
                use_orig_params=True,
                mixed_precision=mixed,
                **options,
            )
            for _ in range(2):
                forward(model).float().backward()
            found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            assert len(found) == 4
        assert fake.races == []
        return [grad.clone() for grad in found]

    assert all(map(torch.equal, gradients(cpu_offload=PINNED), gradients()))
