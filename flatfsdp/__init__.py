"""Fully sharded data parallel training over flat parameters."""

from __future__ import annotations

from .api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from .flat_param import FlatParameter
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .host_memory import keep_host_memory
from .sharded_grad_scaler import ShardedGradScaler
from .summary import Stats, stats, summary

__version__ = "0.1.0"

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FlatParameter",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "ShardedGradScaler",
    "ShardingStrategy",
    "Stats",
    "keep_host_memory",
    "stats",
    "summary",
]
