"""What the units of one model share: the device, its streams, and what counts bytes and collectives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..device.streams import Device, Stream


@dataclass
class Streams:
    """The orders of execution beside compute."""

    unshard: Stream
    reduce: Stream
    replicate: Stream  # an all-reduce runs beside the next reduce-scatter

    def await_downloads(self) -> None:
        """Keep the host until all gradients that are to be there have come."""
        self.reduce.await_downloads()
        self.replicate.await_downloads()


@dataclass(frozen=True)
class RootSettings:
    """The outermost wrapper's arguments that concern the whole tree."""

    device: torch.device
    limit_all_gathers: bool
    check_values: str
    join_units_below: int


def unshard_stream(device: Device, *, on_callers: bool) -> Stream:
    return device.callers_stream("unshard") if on_callers else device.new_stream("unshard", high_priority=True)
