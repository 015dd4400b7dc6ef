"""Values that the units of one model share: the device and its streams, memory, transports, and their counters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...api import Config
from ..base.events import EventLog
from ..comm.axes import Axis
from ..comm.comm_stats import CommStats
from ..comm.transport import Encoding, Exchanges, Transport
from ..device.memory import Limiter, MemoryTracker
from ..device.streams import Device, Stream
from ..flat.flat_param import FlatParamHandle
from ..flat.states import GATHERING


@dataclass(frozen=True)
class ModelSettings:
    """The outermost wrapper's arguments that concern the whole model."""

    device: torch.device
    limit_all_gathers: bool
    check_values: str
    join_units_below: int
    deterministic_sums: bool = False

    @classmethod
    def of(cls, config: Config, device: torch.device) -> ModelSettings:
        """The settings in `config`, for a model that computes on `device`."""
        return cls(
            device, config.limit_all_gathers, config.check_values, config.join_units_below, config.deterministic_sums
        )


@dataclass
class Streams:
    """The streams in addition to that of computation. Those along the shard axis, for which computation waits soonest,
    have a high priority: their copies and casts are not queued behind kernels that fill the device."""

    unshard: Stream
    reduce: Stream
    replicate: Stream  # an all-reduce overlaps with the next reduce-scatter

    def await_downloads(self) -> None:
        """Let the host wait until all downloads of gradients have finished."""
        self.reduce.await_downloads()
        self.replicate.await_downloads()


class Resources:
    """The resources of the units of one model. It holds no unit, so that units can hold it.

    Attributes:
        device, streams, limiter: the compute device, and the orders of execution and of memory there.
        exchanges: the ways in which tensors are exchanged.
        trimmable: transports that free memory while they are idle.
        tracker, comm_stats, events: bytes and collectives by category, events.
    """

    def __init__(
        self, device: Device, tracker: MemoryTracker, exchanges: Exchanges, *, limit_all_gathers: bool
    ) -> None:
        self.device = device
        self.tracker = tracker
        self.comm_stats = CommStats()
        self.events = EventLog()
        self.exchanges = exchanges
        self._transports: dict[tuple[int, str | Encoding], Transport] = {}
        self.trimmable: list[Transport] = []
        self.streams = Streams(
            _unshard_stream(device, on_callers=False),
            device.new_stream("reduce", high_priority=True),
            device.new_stream("replicate"),
        )
        self.limiter = Limiter(device, self.streams.unshard, limit=limit_all_gathers)
        self._gathers_on_callers = False

    def transport(self, axis: Axis, role: str) -> Transport:
        """The transport over `axis`; one per process group and role."""
        key = (id(axis.process_group), role)
        if key not in self._transports:
            made = self.exchanges.transport(axis, self.device, comm_stats=self.comm_stats, tracker=self.tracker)
            self._transports[key] = made
            if made.trims:
                self.trimmable.append(made)
        return self._transports[key]

    def encoded(self, over: Transport, encoding: Encoding | None) -> Transport:
        """`over` with an encoding; `over` itself if that is None, or if there is only one rank."""
        if encoding is None or over.group.size == 1:
            return over
        key = (id(over), encoding)
        if key not in self._transports:
            self._transports[key] = encoding(over)
        return self._transports[key]

    def gather_on_callers_stream(self, on_callers: bool) -> None:
        """Issue gathers on the caller's stream from now on, or on a stream of their own."""
        if on_callers is not self._gathers_on_callers:
            self._gathers_on_callers = on_callers
            self.streams.unshard = _unshard_stream(self.device, on_callers=on_callers)
            self.limiter = Limiter(self.device, self.streams.unshard, limit=self.limiter.limit)

    def share_streams(self, other: Resources) -> None:
        """Use the streams of `other` from now on. Precondition: no operation is pending here. [Note: root]"""
        self.streams = Streams(other.streams.unshard, other.streams.reduce, other.streams.replicate)
        self.limiter = Limiter(self.device, self.streams.unshard, limit=self.limiter.limit)
        self._gathers_on_callers = other._gathers_on_callers

    def free(self, handle: FlatParamHandle) -> None:
        """Reshard `handle`, which is unsharded or being gathered; its memory may be reused once the caller's stream has
        finished with it."""
        if handle.state is GATHERING:
            handle.wait_unshard()
        buffer = handle.reshard()
        if buffer is not None:
            self.limiter.free_later(handle.name, buffer)


def _unshard_stream(device: Device, *, on_callers: bool) -> Stream:
    return Stream("unshard", device, None) if on_callers else device.new_stream("unshard", high_priority=True)
