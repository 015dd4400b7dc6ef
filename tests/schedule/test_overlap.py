"""Communication overlaps with computation: the time of a step where each collective and each unit's computation takes
one *beat*.

The communicator is a double: one thread a communicator, as a backend would have, which serves one operation after the
other. Once its beats are those of a clock that the test winds, which gives exact times; and once they are real.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.comm import transport as comm
from flatfsdp.engine.device.streams import PendingWork
from flatfsdp.engine.transports.staged import StagedTransport
from flatfsdp.wrap import ModuleWrapPolicy
from tests.harness import inspect
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

UNITS = 6


class Clock(Protocol):
    """The time of a test: beats of computation, and communicators."""

    def compute(self) -> None:
        """One beat of computation."""

    def backend(self) -> Callable[[], Any]:
        """A new communicator: each call issues an operation of one beat and returns a handle to wait for."""


class Wound:
    """Time as a number: that of the host."""

    def __init__(self) -> None:
        self.now = 0

    def compute(self) -> None:
        self.now += 1

    def backend(self) -> Callable[[], Any]:
        free = 0

        def issue() -> Any:
            nonlocal free
            free = end = max(free, self.now) + 1

            def wait() -> None:
                self.now = max(self.now, end)

            return wait

        return issue


class Real:
    """Beats of 20 ms. `blocking`: a communicator that overlaps with nothing."""

    BEAT = 0.02

    def __init__(self, *, blocking: bool) -> None:
        self._blocking = blocking
        self._queues: list[queue.SimpleQueue[threading.Event | None]] = []

    def compute(self) -> None:
        time.sleep(self.BEAT)

    def backend(self) -> Callable[[], Any]:
        due: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()
        self._queues.append(due)

        def serve() -> None:
            while (done := due.get()) is not None:
                time.sleep(self.BEAT)
                done.set()

        threading.Thread(target=serve, daemon=True).start()

        def issue() -> Any:
            done = threading.Event()
            due.put(done)
            if self._blocking:
                done.wait()
            return done.wait

        return issue

    def close(self) -> None:
        """End the threads."""
        for due in self._queues:
            due.put(None)


class Issued:
    """A backend's work."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait = wait


class Slow(StagedTransport):
    """Every operation takes a beat of its communicator."""

    def __init__(self, inner: comm.Transport, clock: Clock) -> None:
        super().__init__(**inspect.arguments_of(inner))
        self._begin = clock.backend()

    def all_gather_base(self, output: Tensor, shard: Tensor, stream: Any) -> PendingWork:
        output.zero_()
        return PendingWork(work=Issued(self._begin()), keep=(output, shard))

    def reduce_scatter_base(self, output: Tensor, full: Tensor, stream: Any) -> PendingWork:
        output.zero_()
        return PendingWork(work=Issued(self._begin()), keep=(output, full))

    def all_reduce(self, tensor: Tensor, stream: Any) -> PendingWork:
        return PendingWork(work=Issued(self._begin()), keep=(tensor,))


class Beat(torch.autograd.Function):
    """Identity that computes for a beat, in its backward as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        clock.compute()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.clock.compute()
        return grad, None


class Block(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._clock = clock

    def forward(self, x: Tensor) -> Tensor:
        return x + Beat.apply(self.linear(x), self._clock)


class Halves(nn.Module):
    """A unit of two beats, each with half of its gradients."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.halves = nn.Sequential(Block(clock), Block(clock))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.halves(x)
        return y


@contextmanager
def steps(
    clock: Clock, strategy: str, *, kind: type[Block] | type[Halves] = Block, **options: Any
) -> Iterator[Callable[..., None]]:
    """A function that runs a step of `UNITS` units, with a microbatch for each of `last`; one-time work is
    over."""
    with fake_world(4), comm.doubled(lambda inner: Slow(inner, clock)):
        if strategy == "HYBRID_SHARD":
            options["device_mesh"] = torch.distributed.init_device_mesh("cpu", (2, 2))
        model = FullyShardedDataParallel(
            nn.Sequential(*(kind(clock) for _ in range(UNITS))),
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({kind}),
            use_orig_params=True,
            **options,
        )

        def step(*, last: Sequence[bool] = (True,)) -> None:
            for is_last in last:
                model.set_is_last_backward(is_last)
                model(torch.ones(1, 4)).sum().backward()
            model.zero_grad()

        step()
        yield step


N = UNITS


# One beat a unit, and operations without overlap: the first gather, the last reduction; and each gather that is not
# prefetched, or only when the unit before it has computed.
@pytest.mark.parametrize(
    ("strategy", "options", "forward", "backward"),
    [
        ("FULL_SHARD", {"forward_prefetch": True}, N + 1, N + 2),
        ("FULL_SHARD", {}, 2 * N, N + 2),
        ("FULL_SHARD", {"backward_prefetch": "BACKWARD_POST"}, 2 * N, 2 * N + 1),
        ("FULL_SHARD", {"backward_prefetch": None}, 2 * N, 2 * N + 1),
        ("SHARD_GRAD_OP", {"forward_prefetch": True}, N + 1, N + 1),
        ("NO_SHARD", {}, N, N + 1),
        ("HYBRID_SHARD", {"forward_prefetch": True}, N + 1, N + 3),
    ],
    ids=str,
)
def test_beats_of_a_step(strategy: str, options: dict[str, Any], forward: int, backward: int) -> None:
    clock = Wound()
    with steps(clock, strategy, **options) as step:
        before = clock.now
        step()
        assert clock.now - before == forward + backward


# The last reduction of a backward that is not the last one overlaps with the next forward.
@pytest.mark.parametrize(("last", "hidden"), [((True, True, True), 0), ((False, False, True), 2)], ids=str)
def test_beats_of_a_step_of_three_microbatches(last: Sequence[bool], hidden: int) -> None:
    clock = Wound()
    with steps(clock, "FULL_SHARD", forward_prefetch=True) as step:
        before = clock.now
        step(last=last)
        assert clock.now - before == 3 * (2 * N + 3) - hidden


# Two beats a unit: a gather and a reduction hide behind one of them each. The last reduction but one is waited for.
@pytest.mark.parametrize(
    ("prefetch", "backward"),
    [("BACKWARD_PRE", 2 * N + 2), ("BACKWARD_MID", 2 * N + 3), ("BACKWARD_POST", 3 * N + 1), (None, 3 * N + 1)],
)
def test_beats_of_a_backward_of_units_with_two_halves(prefetch: str | None, backward: int) -> None:
    clock = Wound()
    with steps(clock, "FULL_SHARD", kind=Halves, backward_prefetch=prefetch, forward_prefetch=True) as step:
        before = clock.now
        step()
        assert clock.now - before == 2 * N + 1 + backward


def test_a_step_takes_less_than_seven_tenths_of_the_serial_time() -> None:
    """The best of some each, in turn: other programs on the machine only make a step longer."""
    took: dict[bool, list[float]] = {True: [], False: []}
    for tries in range(6):
        if tries >= 2 and min(took[False]) < 0.7 * min(took[True]):
            break
        for blocking in took:
            clock = Real(blocking=blocking)
            with steps(clock, "FULL_SHARD", forward_prefetch=True) as step:
                began = time.perf_counter()
                step()
                took[blocking].append(time.perf_counter() - began)
            clock.close()
    overlapped, serial = min(took[False]), min(took[True])
    assert serial >= 5 * (N - 1) * Real.BEAT  # gather and compute, twice, and a reduction
    assert overlapped < 0.7 * serial
