"""Fully sharded data parallel training over flat parameters."""

from __future__ import annotations

from . import fsdp_module as _fsdp_module
from . import layout as layout
from .api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from .engine.base.wait_limits import set_collective_timeout
from .engine.config import state_dict_configs as _state_dict_configs
from .engine.config.state_dict_configs import *  # noqa: F403
from .engine.cpu.groups import share_host_memory
from .engine.cpu.malloc import retain_host_memory
from .engine.features.audit import Audit
from .engine.features.block_states import block_states
from .engine.features.compaction import compact_device_memory
from .engine.features.conditional_units import ensure_unit_participation
from .engine.features.forward_methods import register_fsdp_forward_method
from .engine.features.fused_steps import FusedSteps, fuse_optimizer_steps
from .engine.features.matrix_steps import MatrixSteps, matrix_steps
from .engine.features.microbatches import microbatch
from .engine.features.nonfinite import detect_nonfinite
from .engine.features.optimizer_in_backward import OptimizerInBackward, optimizer_in_backward
from .engine.features.persistent_params import inference
from .engine.features.uneven_inputs import join
from .engine.features.value_checks import check_replicas
from .engine.flat.flat_param import FlatParameter
from .engine.inspection.advise import Advice, Choice, Way, advise
from .engine.inspection.dry_run import Plan, dry_run, memory_plan
from .engine.inspection.summary import Stats, UnitSummary, stats, summary, unsharded_shapes
from .engine.watchdog.regions import collective_region, fail_together
from .fsdp_module import *  # noqa: F403
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .sharded_grad_scaler import ShardedGradScaler

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "Audit",
    "BackwardPrefetch",
    "CPUOffload",
    "Choice",
    "FlatParameter",
    "FullyShardedDataParallel",
    "FusedSteps",
    "MatrixSteps",
    "MixedPrecision",
    "OptimizerInBackward",
    "Plan",
    "ShardedGradScaler",
    "ShardingStrategy",
    "Stats",
    "UnitSummary",
    "Way",
    "advise",
    "block_states",
    "check_replicas",
    "collective_region",
    "compact_device_memory",
    "detect_nonfinite",
    "dry_run",
    "ensure_unit_participation",
    "fail_together",
    "fuse_optimizer_steps",
    "inference",
    "join",
    "matrix_steps",
    "memory_plan",
    "microbatch",
    "optimizer_in_backward",
    "register_fsdp_forward_method",
    "retain_host_memory",
    "set_collective_timeout",
    "share_host_memory",
    "stats",
    "summary",
    "unsharded_shapes",
]
__all__ += _state_dict_configs.__all__ + _fsdp_module.__all__
