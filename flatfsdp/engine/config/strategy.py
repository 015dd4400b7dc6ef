"""The traits of sharding strategies, as data.

[Note: axes] Ranks are arranged along two axes. Parameters are sharded along the *shard* axis and replicated along the
*replicate* axis. FULL_SHARD and SHARD_GRAD_OP have only the first, NO_SHARD only the second (its shard axis has size
1), the hybrid strategies both.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...api import ShardingStrategy


@dataclass(frozen=True, slots=True)
class Traits:
    """The traits of a strategy: its axes, and when unsharded parameters are freed."""

    strategy: ShardingStrategy
    shards: bool
    replicates: bool
    reshard_after_forward: bool
    # Whether the unsharded parameters are freed after a backward that did not synchronize gradients.
    reshard_without_sync: bool


_TRAITS = {
    each.strategy: each
    for each in (
        Traits(ShardingStrategy.FULL_SHARD, True, False, True, True),
        Traits(ShardingStrategy.SHARD_GRAD_OP, True, False, False, False),
        Traits(ShardingStrategy.NO_SHARD, False, True, False, False),
        Traits(ShardingStrategy.HYBRID_SHARD, True, True, True, True),
        Traits(ShardingStrategy._HYBRID_SHARD_ZERO2, True, True, False, False),
    )
}


def traits(strategy: ShardingStrategy) -> Traits:
    """The traits of `strategy`."""
    return _TRAITS[strategy]
