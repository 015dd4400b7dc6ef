"""The collectives of units (all-gather, reduce-scatter, all-reduce), by backend. All return `PendingWork`.

[Note: transports] A transport carries out collectives over one axis, and `Exchanges` chooses it. `SingleRank` serves an
axis of one rank. `ProcessGroupTransport` uses torch's flat collectives, and serves every backend for which the model
was given no transport.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from ...api import MixedPrecision
from ..base.overrides import Override
from ..device.memory import MemoryTracker
from ..device.streams import DONE, Device, PendingWork, Stream
from .axes import Axis
from .comm_stats import CommStats
from .process_group_transport import ProcessGroupTransport, copy_unless_there


class SingleRank(ProcessGroupTransport):
    """An axis of one rank: no communication, and nothing is counted."""

    def all_gather_base(self, output: torch.Tensor, shard: torch.Tensor, stream: Stream) -> PendingWork:
        if output.data_ptr() != shard.data_ptr():
            with stream.running():
                output.copy_(shard)
        return stream.pending(output, shard)

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        return self.all_gather_base(output, full, stream)

    def all_gather_coalesced(
        self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        with stream.running():
            copy_unless_there(outputs, shards)
        return stream.pending(*outputs, *shards)

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        return self.all_gather_coalesced(output.split([full.numel() for full in fulls]), fulls, stream)

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork:
        return DONE


Transport = ProcessGroupTransport
Encoding = Callable[[Transport], Transport]  # from a transport to one that sends the same numbers in fewer bits


class Reducer(Protocol):
    """The interface of gradient reductions: implemented by transports and by communication hooks."""

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork: ...

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork: ...

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork: ...


_double: Override[Callable[[Transport], Transport] | None] = Override(None)
doubled = _double.being  # a context in which every new transport is wrapped (for tests, for example to delay works)


@dataclass(frozen=True)
class Exchanges:
    """The ways in which a model exchanges tensors; by default those of torch. [Note: transports]

    Attributes:
        by_backend: the transports of backends, by name, that have one of their own; other: that of all others.
        in_few_bits: the encodings of parameters and of gradients with this precision; None: as they are.
    """

    by_backend: Mapping[str, type[Transport]] = field(default_factory=dict)
    other: type[Transport] = Transport
    in_few_bits: Callable[[MixedPrecision], tuple[Encoding | None, Encoding | None]] = lambda mixed: (None, None)

    def transport(self, group: Axis, device: Device, *, comm_stats: CommStats, tracker: MemoryTracker) -> Transport:
        """A new transport for `group`, chosen by backend and world size."""
        cls = SingleRank if group.process_group is None else self.by_backend.get(group.served_as, self.other)
        made = cls(group, device, comm_stats=comm_stats, tracker=tracker)
        return _double.value(made) if _double.value is not None else made


def is_initialized() -> bool:
    """Whether this process is a rank of a job: whether torch.distributed is initialized."""
    return dist.is_initialized()
