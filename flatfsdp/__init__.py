"""Fully sharded data parallel training over flat parameters."""

from __future__ import annotations

from .api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from .check_replicas import check_replicas
from .flat_param import FlatParameter
from .forward_methods import register_fsdp_forward_method
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .host_memory import keep_host_memory
from .inference import inference
from .nonfinite import detect_nonfinite
from .optimizer_in_backward import OptimizerInBackward, optimizer_in_backward
from .participation import ensure_unit_participation
from .plan import Plan, plan
from .rehearsal import rehearsal
from .sharded_grad_scaler import ShardedGradScaler
from .state_dict_configs import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .step_flat import FlatSteps, step_flat
from .summary import Stats, UnitSummary, stats, summary, whole_shapes
from .uneven import join
from .waits import set_wait
from .watch import failing_together, waiting_for_ranks

__version__ = "0.1.0"

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FlatParameter",
    "FlatSteps",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "OptimizerInBackward",
    "Plan",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "Stats",
    "UnitSummary",
    "check_replicas",
    "detect_nonfinite",
    "ensure_unit_participation",
    "failing_together",
    "inference",
    "join",
    "keep_host_memory",
    "optimizer_in_backward",
    "plan",
    "register_fsdp_forward_method",
    "rehearsal",
    "set_wait",
    "stats",
    "step_flat",
    "summary",
    "waiting_for_ranks",
    "whole_shapes",
]
