"""The two fronts of the engine around the small model, and operations on a model under either."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import flatfsdp
from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.base import _dtensor
from flatfsdp.engine.features.coalescing import uncoalesced

from .net import Block, Net

Wrap = Callable[[Net, torch.device], Any]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def wrapper(**options: Any) -> Wrap:
    """Wrap in `FullyShardedDataParallel`, with each block as a unit. ``across``: (replicas, shards), 0 for all ranks.

    By default, units are not joined: the model is small, but stands for large ones, whose units are not joined.
    """

    def wrap(model: Net, device: torch.device) -> Any:
        given = {"auto_wrap_policy": {Block}, "device_id": device, "join_units_below": 0, **options}
        if "across" in given:
            given["device_mesh"] = _mesh(device, *given.pop("across"))
        return FullyShardedDataParallel(model, **given)

    return wrap


def front(*, joined: bool = False, **options: Any) -> Wrap:
    """Apply `fully_shard` to each block and to the model; ``joined``: join small units, as by default."""

    def wrap(model: Net, device: torch.device) -> Any:
        given = {"mesh": _mesh(device, dist.get_world_size()), **options}
        if "across" in given:
            given["mesh"] = _mesh(device, *given.pop("across"))
        with nullcontext() if joined else uncoalesced():
            for block in model.blocks:
                flatfsdp.fully_shard(block, **given)
            return flatfsdp.fully_shard(model, **given)

    return wrap


def front_with_hooks(**options: Any) -> Wrap:
    """Apply `fully_shard` to weights with gather hooks of their own, which gather bfloat16."""

    def wrap(model: Net, device: torch.device) -> Any:
        from tests.harness.gather_hooks import AsBfloat16, extend

        for block in model.blocks:
            extend(block, AsBfloat16)
        return front(**options)(model, device)

    return wrap


def _mesh(device: torch.device, *shape: int) -> Any:
    world = dist.get_world_size()
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh(device.type, tuple(size or world for size in shape), mesh_dim_names=names)


def whole_parameters(model: Any) -> dict[str, Tensor]:
    """All parameters on the CPU, by name. Collective."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    return {name: _whole(parameter.detach()) for name, parameter in model.named_parameters()}


def _whole(parameter: Tensor) -> Tensor:
    whole = _dtensor.whole_of(parameter) if _dtensor.is_dtensor(parameter) else parameter
    return getattr(whole, "_data", whole).cpu()  # the master weight of a tensor with gather hooks


def clip(model: Any, bound: float) -> None:
    """Clip the norm over all ranks."""
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(bound)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), bound)
