"""A simulated slow link between ranks: results are delayed for the time that a given bandwidth takes.

Each rank has a link of its own, which carries the data that it sends, one collective after the other. Only `wait()` is
slowed down: computation in the meantime hides the link, as it would hide a real one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from flatfsdp.engine.comm.transport import Transport, doubled
from flatfsdp.engine.device.streams import PendingWork, Stream
from flatfsdp.engine.transports.staged import StagedTransport
from tests.harness import inspect


class Link:
    """The outgoing link of one rank.

    Attributes:
        sent: the bytes sent so far.
    """

    def __init__(self, bandwidth: float, delay: float) -> None:
        """`bandwidth` in bytes per second, `delay` in seconds."""
        self._bandwidth, self._delay = bandwidth, delay
        self._free_at = 0.0
        self.sent = 0

    def send(self, count: int) -> float:
        """Put so many bytes on the link. Returned: the time at which they have arrived."""
        self.sent += count
        self._free_at = max(self._free_at, time.monotonic()) + count / self._bandwidth
        return self._free_at + self._delay


class SlowTransport(StagedTransport):
    """A double that delivers the results of a transport once the link has carried them."""

    def __init__(self, inner: Transport, link: Link) -> None:
        super().__init__(**inspect.arguments_of(inner))
        self._inner, self._link = inner, link

    def all_gather_base(self, output: torch.Tensor, shard: torch.Tensor, stream: Stream) -> PendingWork:
        return self._slow(self._inner.all_gather_base(output, shard, stream), shard.nbytes * (self.group.size - 1))

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        others = full.nbytes * (self.group.size - 1) // self.group.size
        return self._slow(self._inner.reduce_scatter_base(output, full, stream), others)

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork:
        others = 2 * tensor.nbytes * (self.group.size - 1) // self.group.size
        return self._slow(self._inner.all_reduce(tensor, stream), others)

    def all_to_all(self, arrived: torch.Tensor, sent: torch.Tensor, stream: Stream) -> PendingWork:
        return self._slow(self._inner.all_to_all(arrived, sent, stream), sent.nbytes)

    def _slow(self, work: PendingWork, count: int) -> PendingWork:
        through = self._link.send(count)
        return PendingWork(work=work, finish=lambda: _sleep_until(through))


@contextmanager
def slow_link(bandwidth: float, delay: float = 0.0) -> Iterator[Link]:
    """Inside, models that are wrapped send through a slow link, and so does torch's FSDP1, which on a CPU waits
    when it sends."""
    link = Link(bandwidth, delay)

    def slowed(function: Any, count: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            through = link.send(count(*args))
            returned = function(*args, **kwargs)
            _sleep_until(through)
            return returned

        return call

    with ExitStack() as stack:
        stack.enter_context(doubled(lambda inner: SlowTransport(inner, link)))
        world = dist.get_world_size()
        for name, count in {
            "all_gather": lambda outputs, shard, *_: shard.nbytes * (world - 1),
            "all_gather_into_tensor": lambda output, shard, *_: shard.nbytes * (world - 1),
            "all_gather_single": lambda output, shard, *_: shard.nbytes * (world - 1),
            "reduce_scatter_tensor": lambda output, full, *_: full.nbytes * (world - 1) // world,
            "reduce_scatter_single": lambda output, full, *_: full.nbytes * (world - 1) // world,
        }.items():
            if hasattr(dist, name):  # the names in FSDP1 depend on torch's version
                stack.enter_context(patch.object(dist, name, slowed(getattr(dist, name), count)))
        yield link


def _sleep_until(moment: float) -> None:
    if (left := moment - time.monotonic()) > 0:
        time.sleep(left)
