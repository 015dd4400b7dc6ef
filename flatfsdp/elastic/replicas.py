"""How a model lies over the ranks of a job: how many ranks have one replica of it between them, and who holds alike.

[Note: replicas that are left] The ranks that are left share the model as it was shared before: FULL_SHARD over all of
them, NO_SHARD on each. A hybrid strategy keeps the number of shards if it divides the number of ranks; otherwise it
takes the next larger number that does, at the most all ranks, in one replica. So no rank is idle, shards grow only
where fewer ranks are left than there were shards, and the shape depends on the number of ranks alone: 2 replicas of 4
shards are 1 of 7 when a rank is lost, 1 of 6 when two are, as 2 of 3 need more memory on each, and 1 of 4 when four
are. The shards of a replica are on consecutive ranks.

What replicas hold alike needs no parity: a lost shard is in each other replica, and a group of ranks that hold alike
can lose all but one. There is a parity where there is one replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..api import HYBRIDS, ShardingStrategy
from ..engine.agreement.process_groups import given_ranks, groups_in_words, new_group
from ..engine.runtime.unit import Unit
from ..errors import UsageError
from ..messages import gather

Alike = tuple[tuple[int, ...], ...]  # groups of ranks that hold alike; none where there is one replica


class Replicas:
    """The replicas of a model.

    Attributes:
        alike: the present groups of ranks that hold alike.
        least: how many shards one has at least; 0 for all ranks.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        """Collective over all ranks.

        Raises:
            UsageError: `units` are not all sharded over all ranks.
        """
        first, world = units[-1].groups, dist.get_world_size()
        for unit in units:
            ranks = given_ranks(unit.groups)
            count = len(ranks[0]) * len(ranks[1]) if unit.groups.strategy in HYBRIDS else len(ranks)
            if count != world or ranks != given_ranks(first):
                raise UsageError(
                    f"survive(): unit {unit.label} is sharded over {groups_in_words(unit.groups)}; expected all ranks, "
                    "the same for all units. A loss is not survived by stages of a pipeline, by tensor or expert "
                    "parallelism, nor by models on a part of the ranks"
                )
        self._is_hybrid = first.strategy in HYBRIDS
        self.least = first.shard.size if self._is_hybrid else 0
        if all(unit.groups.strategy is ShardingStrategy.NO_SHARD for unit in units):
            self.least = 1
        self._mesh = units[-1].built.device_mesh
        if not self._is_hybrid:
            self.move_to(world)
            return
        everyone: Any = dist.group.WORLD
        found = gather(given_ranks(first)[1], everyone, call="called survive()")
        self.alike: Alike = () if first.replicate is None else tuple(dict.fromkeys(map(tuple, found)))

    def move_to(self, world: int) -> int:
        """Let them be those of so many ranks. Returned: how many shards one has. [Note: replicas that are left]"""
        shards = next((each for each in range(self.least or world, world) if world % each == 0), world)
        self.alike = tuple(tuple(range(first, world, shards)) for first in range(shards)) if shards < world else ()
        return shards

    def groups(self) -> Any:
        """The argument `group` of `regroup` for all present ranks. Collective over them."""
        world, rank = dist.get_world_size(), dist.get_rank()
        shards = self.move_to(world)
        if not self._is_hybrid:
            return dist.group.WORLD
        table = torch.arange(world).view(-1, shards)
        row, column = divmod(rank, shards)
        shard = new_group(tuple(table[row].tolist()), "goes on with its shards")
        copies = new_group(tuple(table[:, column].tolist()), "goes on with its replicas")
        if self._mesh is None:
            return shard, copies
        kind, names = self._mesh.device_type, self._mesh.mesh_dim_names
        return DeviceMesh.from_group([copies, shard], kind, table, mesh_dim_names=names)
