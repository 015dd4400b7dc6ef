"""All engines and their settings: the one place that decides whether a comparison is fair.

Engines have their default settings, except for those given here, and the same optimizer. The measuring code does not
depend on the engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import flatfsdp

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
REPLICAS = 2  # of a hybrid strategy


@dataclass(frozen=True)
class Place:
    """The device of a rank, the modules that are units, and the sharding.

    Attributes:
        strategy: one of `STRATEGIES`.
        bf16: compute in bfloat16, reduce in float32.
    """

    device: torch.device
    unit: type[nn.Module]
    strategy: str = "FULL_SHARD"
    bf16: bool = False

    @property
    def mesh(self) -> Any:
        """The mesh (replicate, shard) of a hybrid strategy; None for the others, which means all ranks in one axis."""
        if self.strategy != "HYBRID_SHARD":
            return None
        shape = (REPLICAS, dist.get_world_size() // REPLICAS)
        return dist.device_mesh.init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def _adamw_stepping_flat(model: nn.Module) -> torch.optim.Optimizer:
    made = _adamw(model)
    flatfsdp.fuse_optimizer_steps(made)
    return made


@dataclass(frozen=True)
class Engine:
    """A way to train.

    Attributes:
        wrap: ``wrap(model, place)``, for a model on its device; collective.
        optimize: makes the optimizer, AdamW with the same settings for all.
        alone: whether it runs in one process without a process group.
        sharded: whether `Place.strategy` applies.
        lacks: strategies that it does not support.
    """

    title: str
    wrap: Callable[[nn.Module, Place], nn.Module]
    optimize: Callable[[nn.Module], torch.optim.Optimizer] = _adamw
    alone: bool = False
    sharded: bool = True
    lacks: tuple[str, ...] = ()


def _flat(use_orig_params: bool, **options: Any) -> Callable[[nn.Module, Place], nn.Module]:
    def wrap(model: nn.Module, place: Place) -> nn.Module:
        mixed = flatfsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return flatfsdp.FullyShardedDataParallel(
            model,
            sharding_strategy=place.strategy,
            auto_wrap_policy={place.unit},
            device_id=place.device,
            use_orig_params=use_orig_params,
            mixed_precision=mixed if place.bf16 else None,
            device_mesh=place.mesh,
            **options,
        )

    return wrap


def _flat_keeping_memory(model: nn.Module, place: Place) -> nn.Module:
    flatfsdp.retain_host_memory()
    return _flat(False)(model, place)


def _flat_over_gloo(model: nn.Module, place: Place) -> nn.Module:
    flatfsdp.share_host_memory(False)
    return _flat(False)(model, place)


def _fsdp1(use_orig_params: bool) -> Callable[[nn.Module, Place], nn.Module]:
    def wrap(model: nn.Module, place: Place) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecision

        mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about deprecation, and about a world of one rank, which shards nothing
            return FSDP1(
                model,
                sharding_strategy=ShardingStrategy[place.strategy],
                auto_wrap_policy=ModuleWrapPolicy({place.unit}),
                device_id=place.device,
                use_orig_params=use_orig_params,
                mixed_precision=mixed if place.bf16 else None,
                device_mesh=place.mesh,
            )

    return wrap


def _fsdp2(model: nn.Module, place: Place) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if place.bf16 else MixedPrecisionPolicy()
    mesh = place.mesh or dist.device_mesh.init_device_mesh(place.device.type, (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, place.unit):
            reshard = place.strategy != "SHARD_GRAD_OP"
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _front(model: nn.Module, place: Place) -> nn.Module:
    mixed = flatfsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if place.bf16 else flatfsdp.MixedPrecisionPolicy()
    mesh = place.mesh or dist.device_mesh.init_device_mesh(place.device.type, (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, place.unit):
            reshard = place.strategy != "SHARD_GRAD_OP"
            flatfsdp.fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return flatfsdp.fully_shard(model, mesh=mesh, mp_policy=policy)


def _ddp(model: nn.Module, place: Place) -> nn.Module:
    return DistributedDataParallel(model)


def _floor(model: nn.Module, place: Place) -> nn.Module:
    return model


ENGINES = {
    "flatfsdp": Engine("flatfsdp", _flat(False)),
    "flatfsdp-orig": Engine("flatfsdp, use_orig_params", _flat(True)),
    "flatfsdp-orig-flat": Engine(
        "flatfsdp, use_orig_params, fuse_optimizer_steps()", _flat(True), _adamw_stepping_flat
    ),
    "flatfsdp-rows-flat": Engine(
        'flatfsdp, layout="rows", fuse_optimizer_steps()', _flat(True, layout="rows"), _adamw_stepping_flat
    ),
    "flatfsdp-lean": Engine("flatfsdp, BACKWARD_MID", _flat(False, backward_prefetch="BACKWARD_MID")),
    "flatfsdp-kept": Engine("flatfsdp, retain_host_memory()", _flat_keeping_memory),
    "flatfsdp-gloo": Engine("flatfsdp, share_host_memory(False)", _flat_over_gloo),
    "flatfsdp-front": Engine("flatfsdp fully_shard", _front, lacks=("NO_SHARD",)),
    "flatfsdp-front-flat": Engine(
        "flatfsdp fully_shard, fuse_optimizer_steps()", _front, _adamw_stepping_flat, lacks=("NO_SHARD",)
    ),
    "fsdp1": Engine("FSDP1", _fsdp1(False)),
    "fsdp1-orig": Engine("FSDP1, use_orig_params", _fsdp1(True)),
    "fsdp2": Engine("FSDP2", _fsdp2, lacks=("NO_SHARD",)),
    "ddp": Engine("DDP", _ddp, sharded=False),
    "floor": Engine("one process", _floor, alone=True, sharded=False),
}
BASE = "fsdp1"  # the base of ratios
TRUTH = "ddp"  # the reference for losses
FLOOR = "floor"
