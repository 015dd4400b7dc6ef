"""What a sharding strategy means, as data.

[Note: axes] Ranks are laid out on two axes. Parameters are cut along the *shard* axis and copied along the *replicate* axis.
FULL_SHARD and SHARD_GRAD_OP have only the first, NO_SHARD only the second (its shard axis has size 1), the hybrids both.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..api import ShardingStrategy


@dataclass(frozen=True, slots=True)
class Traits:
    """The strategy's answers: which axes it has and when the unsharded parameters are freed."""

    shards: bool
    replicates: bool
    reshard_after_forward: bool
    # Whether the unsharded parameters are freed after a backward that did not synchronise gradients.
    reshard_without_sync: bool


_TRAITS = {
    ShardingStrategy.FULL_SHARD: Traits(True, False, True, True),
    ShardingStrategy.SHARD_GRAD_OP: Traits(True, False, False, False),
    ShardingStrategy.NO_SHARD: Traits(False, True, False, False),
    ShardingStrategy.HYBRID_SHARD: Traits(True, True, True, True),
    ShardingStrategy._HYBRID_SHARD_ZERO2: Traits(True, True, False, False),
}


def traits(strategy: ShardingStrategy) -> Traits:
    """The traits of `strategy`."""
    return _TRAITS[strategy]
