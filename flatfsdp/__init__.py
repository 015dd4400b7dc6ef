"""Fully sharded data parallel training over flat parameters."""

from __future__ import annotations

from .api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from .engine.base.aliases import install as _find_old_names
from .engine.base.wait_limits import set_wait
from .engine.config.state_dict_configs import (
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
from .engine.device.malloc import keep_host_memory
from .engine.features.check_replicas import check_replicas
from .engine.features.flat_optimizer.api import FlatSteps, step_flat
from .engine.features.forward_methods import register_fsdp_forward_method
from .engine.features.inference import inference
from .engine.features.nonfinite import detect_nonfinite
from .engine.features.optimizer_in_backward import OptimizerInBackward, optimizer_in_backward
from .engine.features.participation import ensure_unit_participation
from .engine.features.uneven_inputs import join
from .engine.flat.flat_param import FlatParameter
from .engine.inspection.dry_run import rehearsal
from .engine.inspection.memory_plan import Plan, plan
from .engine.inspection.summary import Stats, UnitSummary, stats, summary, whole_shapes
from .engine.watchdog.watchdog import failing_together, waiting_for_ranks
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .sharded_grad_scaler import ShardedGradScaler

__version__ = "0.1.0"

_find_old_names()

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
