"""From a plain model and `FSDPArguments` to a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.errors import refuse_value
from flatfsdp.trainer.arguments import STRATEGIES, FSDPArguments
from flatfsdp.trainer.model.hugging_face import initializer_of
from flatfsdp.trainer.model.recomputation import recompute_units
from flatfsdp.trainer.model.units import policy_for
from flatfsdp.trainer.process_group import warn_for_all


def shard(
    model: nn.Module,
    arguments: FSDPArguments,
    *,
    device: torch.device,
    process_group: Any = None,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
) -> FullyShardedDataParallel:
    """`model` under FSDP, in place; build the optimizer on what it returns.

    Collective where the constructor of `FullyShardedDataParallel` is; with `arguments.replicas` process groups are made
    over all ranks.

    Args:
        model: on any device, the meta device included: modules there get their values on `device`.
        arguments: what to shard, and how.
        device: where this rank computes.
        process_group: the ranks to shard over; None for all, as the hybrid strategies need.
        param_init_fn: gives values to a module that was on the meta device; None for its `reset_parameters()`, or for
            what its model of transformers does.

    Raises:
        ConfigTypeError, ConfigValueError: arguments contradict each other, the model or the number of ranks. The model
            is as it was then.
        UsageError: there is no process group, or the model cannot be wrapped.
    """
    policy = policy_for(
        model, arguments.units, fallback=arguments.units_fallback, param_dtype=_dtype(arguments.param_dtype)
    )
    if arguments.activation_checkpointing:
        _check_can_recompute(model, policy)
    sharded = FullyShardedDataParallel(
        model,
        process_group=process_group,
        sharding_strategy=STRATEGIES[arguments.strategy],
        cpu_offload=arguments.cpu_offload,
        auto_wrap_policy=policy,
        backward_prefetch=None if arguments.backward_prefetch is None else arguments.backward_prefetch.upper(),
        mixed_precision=_precision_of(arguments),
        param_init_fn=param_init_fn or initializer_of(model),
        device_id=None if device.type == "cpu" else device,
        sync_module_states=arguments.sync_module_states,
        forward_prefetch=arguments.forward_prefetch,
        limit_all_gathers=arguments.limit_all_gathers,
        use_orig_params=arguments.use_orig_params,
        device_mesh=_mesh_of(arguments, device, process_group),
        reshard_after_forward=arguments.reshard_after_forward,
    )
    if arguments.activation_checkpointing and not recompute_units(sharded):
        warn_for_all("activation_checkpointing: without effect, as units name no module to compute again")
    return sharded


def _precision_of(arguments: FSDPArguments) -> MixedPrecision | None:
    compute, reduce, buffers = arguments.param_dtype, arguments.reduce_dtype, arguments.buffer_dtype
    if compute is reduce is buffers is None:
        return None
    return MixedPrecision(_dtype(compute), _dtype(reduce), _dtype(buffers))


def _dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    assert not isinstance(value, str), "names are dtypes once arguments are checked"
    return value


def _mesh_of(arguments: FSDPArguments, device: torch.device, process_group: Any) -> DeviceMesh | None:
    if "hybrid" in arguments.strategy and process_group is not None:
        hint = "A pair of groups, or a mesh, can be given to FullyShardedDataParallel itself."
        refuse_value("process_group", process_group, f"None, with strategy {arguments.strategy}", hint=hint)
    if arguments.replicas is None:
        return None
    world = dist.get_world_size()
    if world % arguments.replicas:
        divisors = ", ".join(str(count) for count in range(1, world + 1) if world % count == 0)
        refuse_value("replicas", arguments.replicas, f"a divisor of the {world} ranks: {divisors}")
    return init_device_mesh(device.type, (arguments.replicas, world // arguments.replicas))


def _check_can_recompute(model: nn.Module, policy: Any) -> None:
    if policy is None:
        hint = "With it each unit inside the model keeps its inputs only; name some by units."
        refuse_value("activation_checkpointing", True, "False for a model that is a single unit", hint=hint)
    own = [path for path, module in model.named_modules() if getattr(module, "gradient_checkpointing", False) is True]
    if own:
        hint = f"{own[0] or type(model).__name__!r} has its own, which would run within; leave one of them out."
        refuse_value("activation_checkpointing", True, "False for a model that checkpoints activations", hint=hint)
