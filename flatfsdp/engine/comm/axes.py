"""Axes of ranks over which the collectives of a unit run, and the axes of one unit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ...api import ShardingStrategy
from ..base.overrides import Override
from ..base.per_group import for_group, known_for_group

_ONLY_REDUCES = "only reduces"  # the key of that mark of a process group
_backend: Override[str | None] = Override(None)
served_as = _backend.being  # a context in which this backend is assumed for all groups: for dry runs


def backend_for(process_group: Any, device: torch.device) -> str | None:
    """The name of the backend of `process_group` that serves tensors on `device`; None if none is known to."""
    backends = str(dist.get_backend_config(process_group))  # "cpu:gloo,cuda:nccl" or "gloo"
    return dict(part.split(":") for part in backends.split(",") if ":" in part).get(device.type)


def serves(process_group: Any, device: torch.device) -> bool:
    """Whether a backend of `process_group` (of a pair: the first) supports tensors on `device`."""
    group = process_group[0] if isinstance(process_group, tuple) else process_group
    return device.type in str(dist.get_backend_config(group))


def mark_for_reductions(process_group: Any) -> None:
    """Only gradients are exchanged in `process_group`."""
    for_group(process_group, _ONLY_REDUCES, lambda: True)


def only_reduces(process_group: Any) -> bool:
    """Whether only gradients are exchanged in `process_group`: transports may use smaller buffers for it."""
    return known_for_group(process_group, _ONLY_REDUCES, bool) or False


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

    @property
    def given_ranks(self) -> tuple[Any, ...]:
        """The global ranks of `given`; a pair of such tuples for a pair."""
        if isinstance(self.given, tuple):
            return tuple(tuple(dist.get_process_group_ranks(group)) for group in self.given)
        return tuple(dist.get_process_group_ranks(self.given))

    @property
    def process_groups(self) -> set[Any]:
        """The groups of all axes, those that the user passed, and the default group."""
        given = self.given if isinstance(self.given, tuple) else (self.given,)
        axes = (axis.process_group for axis in (self.shard, self.scatter, self.replicate) if axis is not None)
        return {group for group in (*given, *axes, dist.group.WORLD) if group is not None}

    @cached_property
    def world(self) -> int:
        """The number of ranks whose gradients are averaged."""
        return self.shard.size * (self.replicate.size if self.replicate is not None else 1)


def extent_of(plan: ProcessGroups) -> str:
    """The numbers of shards and replicas, for example "2 x 4"."""
    return f"{plan.shard.size} x {plan.replicate.size if plan.replicate is not None else 1}"


def groups_in_words(plan: ProcessGroups) -> str:
    """The axes in words, for example "2 shards on ranks 0-1, 2 replicas on ranks 0, 2"."""
    axes = []
    if plan.shard.size > 1 or plan.replicate is None:
        axes.append(f"{_counted(plan.shard, 'shard')} on {_ranks(plan.shard)}")
    if plan.replicate is not None:
        axes.append(f"{_counted(plan.replicate, 'replica')} on {_ranks(plan.replicate)}")
    return ", ".join(axes)


def _counted(group: Axis, noun: str) -> str:
    return f"{group.size} {noun}{'' if group.size == 1 else 's'}"


def _ranks(group: Axis) -> str:
    """The global ranks in short form: "ranks 0-7", "ranks 0, 8, .. 56", "rank 3"."""
    ranks = group.ranks
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    if len(ranks) > 4:
        return f"ranks {ranks[0]}, {ranks[1]}, .. {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
