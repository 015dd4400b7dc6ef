"""Streams on a device that finds races: waits, and the time when memory is freed.

A wait that nothing needs would hide here as well as one that is missing, so each is taken out and must be missed.
"""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatfsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, wrap
from flatfsdp.engine.base import wait_limits
from flatfsdp.engine.comm import transport as comm
from flatfsdp.engine.device.memory import FlatBuffer
from flatfsdp.engine.device.streams import Device, PendingWork, Stream
from flatfsdp.engine.features.borrowed_memory import BorrowedBuffer
from flatfsdp.engine.flat.reduction import Reduction
from tests.comm.test_communication import (
    NUMELS,
    UNITS,
    WIDTH,
    Block,
    Collectives,
    forward,
    padded,
    settled,
    wrapped,
)
from tests.harness import inspect
from tests.harness.fake import fake_world
from tests.harness.fake_device import FakeDevice
from tests.harness.thorough import some

pytestmark = pytest.mark.single_process

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@contextmanager
def device_of(world: int = 4, **options: Any) -> Iterator[FakeDevice]:
    with fake_world(world), FakeDevice(**options) as device:
        yield device


def train(model: FullyShardedDataParallel, device: FakeDevice, *, steps: int = 2) -> None:
    """Steps with a window, clipping and an evaluation between them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        with model.no_sync():
            forward(model).backward()
        for is_last in (False, True):
            model.set_is_last_backward(is_last)
            forward(model).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        with torch.no_grad():
            forward(model)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_orig_params": True},
    {"limit_all_gathers": False},
    {"forward_prefetch": True},
    {"backward_prefetch": None},
    {"backward_prefetch": "BACKWARD_MID"},
    {"backward_prefetch": "BACKWARD_POST", "limit_all_gathers": False},
    {"mixed_precision": MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)},
    {"mixed_precision": MixedPrecision(gather_dtype=torch.int8, reduce_bits=4)},
    {"mixed_precision": MixedPrecision(reduce_bits=8, reduce_error_feedback=True)},
    {"mixed_precision": MixedPrecision(param_dtype=BF16, accumulate_dtype=FP32), "use_orig_params": True},
    {"mixed_precision": MixedPrecision(reduce_dtype=FP16), "forward_prefetch": True},
    {"cpu_offload": CPUOffload(offload_params=True)},
]


def named(options: dict[str, Any]) -> str:
    parts = [f"{name}={value}" for name, value in options.items() if not isinstance(value, MixedPrecision)]
    mixed = options.get("mixed_precision")
    dtypes = [mixed.param_dtype, mixed.reduce_dtype, mixed.accumulate_dtype] if mixed else []
    dtypes += ["error feedback"] if mixed and mixed.reduce_error_feedback else []
    return ", ".join([*parts, *map(str, dtypes)]) or "defaults"


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param(strategy, options, id=f"{strategy}-{named(options)}")
        for row, strategy in enumerate(STRATEGIES)
        for options in some(OPTIONS, 2, row)
    ],
)
def test_nothing_happens_too_early(strategy: str, options: dict[str, Any]) -> None:
    with device_of() as device:
        mesh = {"mesh": (2, 2)} if "HYBRID" in strategy else {}
        model = wrapped(strategy, **mesh, **options)
        train(model, device)
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        train(model, device, steps=1)
        live = set(inspect.memory(model).held) - {"residual"}
        assert live == {"shard"}, "a device that is never found to be anywhere holds memory back"
        del model
    assert device.races == []


def test_kinds_and_ties_happen_in_order() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()
            self.second.up.weight = self.first.up.weight
            self.first.down.requires_grad_(False)
            self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) * self.scale.float())

    with device_of() as device:
        policy = wrap.ModuleWrapPolicy({Block})
        train(FullyShardedDataParallel(Tied(), auto_wrap_policy=policy, use_orig_params=True), device)
    assert device.races == []


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


WAITS: list[tuple[str, Callable[[], AbstractContextManager[Any]], str]] = [
    (
        "streams after compute",
        lambda: patch.object(Stream, "follow_compute", nothing),
        "_allgather_base_ on unshard may read before",
    ),
    (
        "compute after streams",
        lambda: patch.object(Device, "await_mark", nothing),
        "before _allgather_base_ on unshard has written",
    ),
    (
        "memory after compute",
        lambda: patch.object(Stream, "await_mark", nothing),
        "unsharded buffer goes back to unshard before",
    ),
    (
        "slots after their reduction",
        lambda: patch.object(Reduction, "release_input", _impatient),
        "slots buffer goes back to compute before",
    ),
]


def _impatient(reduction: Reduction) -> None:
    """`Reduction.release_input` that does not wait."""
    if not reduction.input_is_released:
        reduction.input_is_released = True
        for part in reduction.inputs:
            part.release_buffer()


@pytest.mark.parametrize(("without", "race"), [wait[1:] for wait in WAITS], ids=[wait[0] for wait in WAITS])
def test_every_wait_is_needed(without: Callable[[], AbstractContextManager[Any]], race: str) -> None:
    with device_of() as device, without():
        train(wrapped("FULL_SHARD"), device)
    assert any(race in found for found in device.races), device.races


def test_the_optimizers_writes_come_before_the_next_gather() -> None:
    with device_of() as device:
        model = wrapped("FULL_SHARD")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        forward(model).backward()
        optimizer.step()
        device.log.clear()
        forward(model)
    assert device.log[:4] == [
        "unshard waits for compute",
        "allocate unsharded on unshard",
        "record unshard",
        "compute waits for unshard",
    ]


def test_a_backward_in_order_of_issue() -> None:
    with device_of() as device:
        model = FullyShardedDataParallel(nn.Sequential(wrap_one(nn.Linear(3, 3)), nn.Linear(3, 1)))
        for _ in range(2):
            loss = model(torch.randn(2, 3)).sum()
            device.log.clear()
            loss.backward()
    assert device.log == [
        "compute waits for the backend",  # the bitmap of the last backward
        # The root is whole; the inner unit is gathered ahead, before the root's gradients. Its memory of the forward is
        # still there: it is filled again, after its last use.
        "unshard waits for compute",
        "record unshard",
        # The root's gradients are in, in its parameters' places. Their reduction waits for its turn.
        "compute waits for unshard",  # the inner unit's backward begins
        "reduce waits for compute",  # its gradients are in, in its parameters' places
        "record reduce",
        # The root's turn. One reduction's input besides the one that is filled: the inner unit's is freed.
        "compute waits for reduce",
        "record compute",
        "reduce waits for compute",
        "record reduce",
        "compute waits for reduce",
        "record compute",
        # The end: all memory goes back.
        "unshard waits for compute",
        "free unsharded on unshard",
        "unshard waits for compute",
        "free unsharded on unshard",
    ]
    assert device.races == []


def test_a_sum_over_replicas_runs_beside_the_next_reduce_scatter() -> None:
    unknown: list[int] = []
    scatter = comm.ProcessGroupTransport.reduce_scatter_base

    def watched(
        self: comm.ProcessGroupTransport, output: torch.Tensor, full: torch.Tensor, stream: Stream
    ) -> PendingWork:
        across = inspect.replicate_stream(model)
        unknown.append(across.clock[across] - stream._stream.clock.get(across, 0))
        return scatter(self, output, full, stream)

    with device_of() as device:
        model = wrapped("HYBRID_SHARD", mesh=(2, 2))
        train(model, device, steps=1)
        with patch.object(comm.ProcessGroupTransport, "reduce_scatter_base", watched):
            forward(model).backward()
    assert unknown == [0, 1, 1, 1]  # but for the first, each is issued with the sum of the one before under way
    assert device.races == []


def test_a_gather_runs_beside_the_unit_before() -> None:
    with device_of() as device:
        model = wrapped("FULL_SHARD")
        forward(model).backward()
        device.log.clear()
        forward(model)
    gather = ["allocate unsharded on unshard", "record unshard", "compute waits for unshard"]
    assert device.log == [
        "unshard waits for compute",  # the optimizer's writes
        *gather,  # the root
        *gather,  # a
        "record compute",
        *gather,  # b: during the computation of a, whose memory is held
        "record compute",
        "unshard waits for compute",  # c: during that of b, in the memory of a
        "free unsharded on unshard",
        *gather,
        "record compute",
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"forward_prefetch": True}, {"backward_prefetch": None}, {"backward_prefetch": "BACKWARD_MID"}],
    ids=named,
)
def test_with_the_limit_two_units_hold_memory_besides_the_root(options: dict[str, Any]) -> None:
    with device_of() as device:
        model = wrapped("FULL_SHARD", **options)
        train(model, device, steps=1)
        ledger = inspect.memory(model)
        ledger.reset_peaks()
        train(model, device, steps=1)
        block, *_, own = padded(NUMELS, 4)
        assert ledger.peak("unsharded") == 4 * (own + 2 * block)
    assert device.races == []


@pytest.mark.parametrize(
    ("prefetch", "most"), [("BACKWARD_PRE", 3), ("BACKWARD_POST", 3), ("BACKWARD_MID", 2), (None, 3)]
)
def test_whole_units_at_once_besides_the_root(prefetch: str | None, most: int) -> None:
    """Parameters and gradients. Half-way the memory that a reduction has read goes to the next gather."""
    found = 0
    with device_of() as device:
        model = wrapped("FULL_SHARD", backward_prefetch=prefetch)
        train(model, device, steps=1)
        memory = inspect.memory(model)
        loss = forward(model)

        def measure(event: inspect.Event) -> None:
            nonlocal found
            found = max(found, memory.live["unsharded"] + memory.live["slots"])

        device.log.clear()
        with inspect.events(model).listening(measure):
            loss.backward()
        block, *_, own = padded(NUMELS, 4)
        assert found == 4 * (own + most * block)
    half_way = [
        "compute waits for reduce",
        "record compute",
        "unshard waits for compute",
        "free unsharded on unshard",
        "allocate unsharded on unshard",
        "record unshard",
    ]
    runs = [device.log[at : at + len(half_way)] for at in range(len(device.log))]
    assert (half_way in runs) is (prefetch == "BACKWARD_MID")
    assert device.races == []


@pytest.mark.parametrize(
    ("prefetch", "narrow"), [("BACKWARD_PRE", 5), ("BACKWARD_POST", 4), ("BACKWARD_MID", 3), (None, 5)]
)
def test_gradients_have_the_wide_dtype_of_one_unit_at_a_time(prefetch: str | None, narrow: int) -> None:
    """The input of a reduction is freed before the next one's memory is taken, and so are parameters that nothing reads
    any more. `narrow`: whole units in the dtype of parameters that all take, the wide one counted twice."""
    peaks: Counter[str] = Counter()
    mixed = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)
    with device_of() as device, inspect.large_gradients():
        model = wrapped("FULL_SHARD", backward_prefetch=prefetch, mixed_precision=mixed, join_units_below=0)
        train(model, device)
        live = inspect.memory(model).live

        def measure(event: inspect.Event) -> None:
            peaks.update({kind: max(0, live[kind] - peaks[kind]) for kind in ("slots", "arrived")})
            together = live["unsharded"] + live["slots"] + live["arrived"]
            peaks["together"] = max(peaks["together"], together)

        loss = forward(model)
        with inspect.events(model).listening(measure):
            loss.backward()
    block, *_, own = padded(NUMELS, 4)
    assert peaks["slots"] == 4 * block
    assert peaks["arrived"] <= 2 * (block + own)
    assert (peaks["together"] - 2 * own) // (2 * block) == narrow
    assert device.races == []


def borrowing() -> list[str]:
    """The log of a step in which the outermost unit's gradients may have the memory of gathers."""
    mixed = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)
    with device_of() as device, inspect.large_gradients():
        model = wrapped("FULL_SHARD", mixed_precision=mixed, join_units_below=0)
        slots = inspect.borrow_gathers_memory(model)
        for step in range(3):
            if step == 2:
                slots.borrows = True
                device.log.clear()
            forward(model).backward()
            model.zero_grad()
    return [*device.log, *device.races]


def test_the_outermost_units_gradients_borrow_the_memory_of_gathers() -> None:
    """At the end of a backward that is free. It is taken back before the next gather. [Note: borrowed memory]"""
    log = borrowing()
    slots = [entry for entry in log if entry.startswith(("allocate slots", "free slots"))]
    assert slots[-2:] == ["allocate slots on unshard", "free slots on unshard"]
    assert slots.count(slots[-1]) == 1
    at = log.index("allocate slots on unshard")
    assert log[at + 1 : at + 3] == ["record unshard", "compute waits for unshard"]
    assert not any("allocate unsharded" in entry for entry in log[at:])
    assert not any("before" in entry for entry in log), "a race"


def test_borrowed_memory_goes_back_after_its_reduction() -> None:
    with patch.object(BorrowedBuffer, "free", FlatBuffer.free):
        assert any("goes back to unshard before" in entry for entry in borrowing())


def wrap_one(module: nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module)


def test_without_the_limit_memory_goes_back_when_the_device_is_past_its_last_use() -> None:
    def most_unsharded(*, is_fast: bool, limit: bool) -> int:
        with device_of(is_fast=is_fast) as device:
            model = wrapped("FULL_SHARD", limit_all_gathers=limit)
            train(model, device, steps=1)
            ledger = inspect.memory(model)
            ledger.reset_peaks()
            forward(model).backward()
            waits = device.log.count("unshard waits for compute")
            assert waits > 10 if limit else True
            assert any(entry.startswith("query") for entry in device.log) is not limit
            assert ledger.live["unsharded"] == 0
        assert device.races == []
        return ledger.peak("unsharded")

    with_limit = most_unsharded(is_fast=False, limit=True)
    assert most_unsharded(is_fast=True, limit=False) == with_limit
    # The host runs ahead of a slow device, and everything is held until the end of the iteration.
    assert most_unsharded(is_fast=False, limit=False) == 4 * sum(padded(NUMELS, 4)) > with_limit


def test_the_host_may_write_to_offloaded_shards_after_an_evaluation() -> None:
    def evaluate() -> list[str]:
        with device_of() as device:
            model = wrapped("FULL_SHARD", cpu_offload=True)
            with torch.no_grad():
                forward(model)
                with device.by_host():
                    for parameter in model.parameters():
                        parameter.mul_(2)
        return device.races

    assert evaluate() == []
    with patch.object(Device, "block_host", nothing):
        assert any("mul_ on the host may write before copy_ on unshard is over" in race for race in evaluate())


def test_a_failed_backward_leaves_streams_in_order() -> None:
    class Fails(Exception):
        pass

    def fail(grad: torch.Tensor) -> None:
        raise Fails

    with device_of() as device:
        model = wrapped("FULL_SHARD", use_orig_params=True)
        train(model, device, steps=1)
        x = torch.randn(3, WIDTH, requires_grad=True)
        x.register_hook(fail)
        with pytest.raises(Fails):
            model(x).sum().backward()
        train(model, device, steps=1)
    assert device.races == []


def test_a_model_that_is_deleted_keeps_its_memory_until_the_last_reduction() -> None:
    """Which a backward that is not the last leaves under way."""
    with device_of() as device:
        model = wrapped("FULL_SHARD")
        settled(model)
        model.set_is_last_backward(False)
        forward(model).backward()
        del model
        gc.collect()
        device.reap()
    assert device.races == []


@pytest.mark.parametrize("is_fast", [False, True])
def test_the_watch_asks_the_newest_collective_of_each_stream(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the device does not pass is a wait of this rank, though the host waits for nothing."""
    with device_of(is_fast=is_fast) as device:
        model = wrapped("HYBRID_SHARD", mesh=(2, 2))
        forward(model).backward()
        assert math.isinf(wait_limits.blocked_since())
        later = time.monotonic() + 60.0
        monkeypatch.setattr(wait_limits.time, "monotonic", lambda: later)
        assert math.isfinite(wait_limits.blocked_since()) is not is_fast
        asked = [entry for entry in device.log if entry.startswith("query")]
    assert sorted({*asked}) == ["query reduce", "query replicate", "query unshard"]


def test_streams_along_the_shard_axis_have_a_high_priority() -> None:
    """As FSDP2's: computation waits for gathers and reduce-scatters soonest."""
    made: dict[str, int] = {}
    new_stream = FakeDevice.Stream

    def noted(device: FakeDevice, *args: Any, **options: Any) -> Any:
        stream = new_stream(device, *args, **options)
        made[stream.name] = stream.priority
        return stream

    with patch.object(FakeDevice, "Stream", noted), device_of():
        wrapped("HYBRID_SHARD", mesh=(2, 2))
    assert made == {"unshard": -1, "reduce": -1, "replicate": 0}


@contextmanager
def full_device(*, after: int, failures: int) -> Iterator[list[str]]:
    """A device that has no memory, `after` so many allocations of buffers, for the next ones; the failures."""
    resize, failed, made = torch.UntypedStorage.resize_, list[str](), list[int]()

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        if size and len(made) == after and len(failed) < failures:
            failed.append("no memory")
            raise torch.OutOfMemoryError("no memory")
        if size:
            made.append(size)
        return resize(storage, size)

    with patch.object(torch.UntypedStorage, "resize_", resized):
        yield failed


def test_an_allocation_without_memory_frees_what_is_held_and_is_tried_once_more() -> None:
    with device_of() as device:
        model = wrapped("FULL_SHARD", limit_all_gathers=False)
        settled(model)
        with Collectives() as usual:
            forward(model).backward()
        device.log.clear()
        with Collectives() as seen, full_device(after=UNITS - 1, failures=1) as failed:
            loss = forward(model)  # holds the buffers of units that it has left, as the device is behind
        assert failed == ["no memory"]
        memory = [each for each in device.log if each.startswith(("free", "allocate"))]
        assert memory == ["allocate unsharded on unshard"] * 3 + ["free unsharded on unshard"] * 2 + memory[:1]
        with seen:
            loss.backward()
    assert seen.counts == usual.counts, "no collective runs twice"
    assert device.races == []


def test_an_allocation_that_fails_twice_is_the_programs_error() -> None:
    with device_of():
        model = wrapped("FULL_SHARD", limit_all_gathers=False)
        settled(model)
        with full_device(after=UNITS - 1, failures=2) as failed, pytest.raises(torch.OutOfMemoryError):
            forward(model)
        assert len(failed) == 2


def test_clipping_is_one_call_for_all_gradients_and_the_host_waits_for_none() -> None:
    class Calls(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names[func._schema.name.removeprefix("aten::")] += 1
            return func(*args, **(kwargs or {}))

    with device_of() as device:
        model = wrapped("FULL_SHARD", use_orig_params=True)
        settled(model)
        forward(model).backward()
        device.host_waits.clear()
        with Calls() as calls:
            model.clip_grad_norm_(1.0)
    assert device.host_waits == [] and device.races == []
    assert calls.names["_foreach_norm"] == calls.names["_foreach_mul_"] == 1
    assert not calls.names["mul_"] and not calls.names["linalg_vector_norm"]
