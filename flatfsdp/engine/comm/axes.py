"""Axes of ranks over which the collectives of a unit run, and the axes of one unit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ...api import ShardingStrategy
from ..base.overrides import Override

_backend: Override[str | None] = Override(None)
served_as = _backend.being  # a context in which this backend is assumed for all groups: for dry runs


def backend_for(process_group: Any, device: torch.device) -> str | None:
    """The name of the backend of `process_group` that serves tensors on `device`; None if none is known to."""
    backends = str(dist.get_backend_config(process_group))  # "cpu:gloo,cuda:nccl" or "gloo"
    return dict(each.split(":") for each in backends.split(",") if ":" in each).get(device.type)


@dataclass(frozen=True)
class Axis:
    """One axis of ranks: a process group, or this rank alone.

    Attributes:
        process_group: None for an axis of size 1 that needs no communication.
        ranks: global ranks of the members in group order; still known after the process group was destroyed.
        rank: this rank's index in `ranks`.
        backend: the name of the backend that serves this device type.
    """

    process_group: Any
    ranks: tuple[int, ...]
    rank: int
    backend: str

    @staticmethod
    def alone() -> Axis:
        """The axis of size 1."""
        return Axis(None, (dist.get_rank() if dist.is_initialized() else 0,), 0, "alone")

    @staticmethod
    def of(process_group: Any, device: torch.device) -> Axis:
        """The axis over `process_group`, for tensors on `device`."""
        backend = backend_for(process_group, device) or str(dist.get_backend_config(process_group))
        ranks = tuple(dist.get_process_group_ranks(process_group))
        return Axis(process_group, ranks, dist.get_rank(process_group), backend)

    @property
    def served_as(self) -> str:
        """The name of the backend that is assumed for this axis: its own, except in dry runs."""
        return _backend.value or self.backend

    @cached_property
    def size(self) -> int:
        """The number of ranks on the axis."""
        return len(self.ranks)


@dataclass(frozen=True)
class ProcessGroups:
    """The axes of one unit.

    Attributes:
        shard: ranks that hold the pieces of one copy; parameters are gathered over it.
        scatter: the same ranks on a communicator of its own, for reductions ([Note: backward order]).
        replicate: ranks that hold the same piece of different copies; None if there is one copy.
        strategy: the sharding strategy that the axes were made for.
        given: the process group that the user passed (or the default), or the pair (shard group, replicate group).
        device: the device of the tensors that are communicated.
    """

    shard: Axis
    scatter: Axis
    replicate: Axis | None
    strategy: ShardingStrategy
    given: Any
    device: torch.device

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGroups:
        return self  # copies of a model communicate over the same groups

    @cached_property
    def world(self) -> int:
        """The number of ranks whose gradients are averaged."""
        return self.shard.size * (self.replicate.size if self.replicate is not None else 1)
