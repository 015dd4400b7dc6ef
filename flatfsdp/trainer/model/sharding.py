"""From a plain model and `FSDPArguments` to a sharded model.

[Note: recomputation] Activation checkpointing: the forward of a module runs again in the backward, instead of keeping
its activations. The module itself stays the same, names included: only its attribute `forward` changes. It happens
inside a unit, so that the unit is gathered once for both the recomputation and its gradients.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from flatfsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard_by_policy
from flatfsdp.errors import UsageError, refuse_value
from flatfsdp.trainer.arguments import STRATEGIES, FSDPArguments
from flatfsdp.trainer.model.fronts import inside, sharded_inside
from flatfsdp.trainer.model.hugging_face import initializer_of
from flatfsdp.trainer.model.units import policy_for
from flatfsdp.trainer.process_group import warn_for_all
from flatfsdp.trainer.settings.references import resolve


def shard(
    model: nn.Module,
    arguments: FSDPArguments,
    *,
    device: torch.device,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
) -> Any:
    """Shard `model` in place over all ranks; build the optimizer on the result: the wrapper, or, with the front
    fully_shard, the model itself.

    Collective like the constructor of `FullyShardedDataParallel`; with `arguments.replicas` process groups are made
    over all ranks.

    Args:
        model: on any device, the meta device included: modules on the meta device are materialized on `device`.
        arguments: the settings of sharding.
        device: the device that this rank computes on.
        param_init_fn: gives values to a module that was on the meta device; None for its `reset_parameters()`, or the
            initialization by its model of transformers.

    Raises:
        ConfigTypeError, ConfigValueError: arguments contradict each other, the model or the number of ranks. The model
            is unchanged then.
        UsageError: there is no process group, or the model cannot be wrapped.
    """
    # Checked arguments have dtypes in place of names.
    names = "param_dtype", "reduce_dtype", "buffer_dtype", "gather_dtype", "reduce_bits", "reduce_error_feedback"
    precision: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    policy = policy_for(model, arguments.units, fallback=arguments.units_fallback, param_dtype=precision["param_dtype"])
    if arguments.activation_checkpointing:
        _check_can_recompute(model, policy)
    given: dict[str, Any] = {
        "backward_prefetch": None if arguments.backward_prefetch is None else arguments.backward_prefetch.upper(),
        "param_init_fn": param_init_fn or initializer_of(model),
        "sync_module_states": arguments.sync_module_states,
        "deterministic_sums": arguments.deterministic_sums,
        "forward_prefetch": arguments.forward_prefetch,
        "limit_all_gathers": arguments.limit_all_gathers,
    }
    mixed_precision = None if not any(precision.values()) else MixedPrecision(**precision)
    make = _in_place if arguments.front == "fully_shard" else _wrapped
    sharded = make(model, arguments, device, policy, mixed_precision, given)
    if arguments.activation_checkpointing:
        chosen = resolve(arguments.checkpoint_policy, argument="checkpoint_policy")
        if not recompute_units(sharded, every=arguments.checkpoint_every, policy=chosen):
            warn_for_all("activation_checkpointing has no effect: units= names no module to recompute")
    if arguments.compile:
        compile_units(sharded)
    if arguments.keep_frozen_unsharded:
        sharded.keep_frozen_unsharded()
    return sharded


def _wrapped(
    model: nn.Module,
    arguments: FSDPArguments,
    device: torch.device,
    policy: Any,
    mixed_precision: MixedPrecision | None,
    given: dict[str, Any],
) -> Any:
    return FullyShardedDataParallel(
        model,
        sharding_strategy=STRATEGIES[arguments.strategy],
        cpu_offload=arguments.cpu_offload,
        auto_wrap_policy=policy,
        mixed_precision=mixed_precision,
        device_id=None if device.type == "cpu" else device,
        use_orig_params=arguments.use_orig_params,
        device_mesh=None if arguments.replicas is None else _mesh(arguments.replicas, device),
        reshard_after_forward=arguments.reshard_after_forward,
        layout=arguments.layout or "flat",
        **given,
    )


def _in_place(
    model: nn.Module,
    arguments: FSDPArguments,
    device: torch.device,
    policy: Any,
    mixed_precision: MixedPrecision | None,
    given: dict[str, Any],
) -> Any:
    if not dist.is_initialized():
        raise UsageError("fully_shard: there is no process group. Call torch.distributed.init_process_group() first")
    keeps = STRATEGIES[arguments.strategy] in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
    reshard = arguments.reshard_after_forward
    replicas = arguments.replicas or (_count_of_nodes() if arguments.strategy.startswith("hybrid") else None)
    return fully_shard_by_policy(
        model,
        policy,
        mesh=init_device_mesh(device.type, (dist.get_world_size(),)) if replicas is None else _mesh(replicas, device),
        reshard_after_forward=False if reshard is None and keeps else reshard,
        mp_policy=mixed_precision,
        offload_policy=CPUOffloadPolicy() if arguments.cpu_offload else None,
        **given,
    )


def _mesh(replicas: int, device: torch.device) -> DeviceMesh:
    world = dist.get_world_size()
    if world % replicas:
        divisors = ", ".join(str(count) for count in range(1, world + 1) if world % count == 0)
        refuse_value("replicas", replicas, f"a divisor of the {world} ranks: {divisors}")
    return init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def _count_of_nodes() -> int:
    world = dist.get_world_size()
    of_node = int(os.environ.get("LOCAL_WORLD_SIZE") or 0) or torch.accelerator.device_count()
    if not of_node or world % of_node:
        hint = "The number of ranks per node is unknown: launch with torchrun, or set replicas=."
        refuse_value("replicas", None, f"a divisor of the {world} ranks", hint=hint)
    return world // of_node


def _check_can_recompute(model: nn.Module, policy: Any) -> None:
    if policy is None:
        hint = "It recomputes units inside of the model; name some with units=."
        refuse_value("activation_checkpointing", True, "False for a model that is a single unit", hint=hint)
    own = [path for path, module in model.named_modules() if getattr(module, "gradient_checkpointing", False) is True]
    if own:
        hint = f"{own[0] or type(model).__name__!r} has its own, which would run inside of it; disable one of them."
        refuse_value("activation_checkpointing", True, "False for a model that checkpoints activations", hint=hint)


def units_inside(model: nn.Module) -> list[nn.Module]:
    """The modules of the units inside `model` except the outermost, in the order of `modules()`; without batch norms,
    which are separate units under mixed precision."""
    return [module for module in sharded_inside(model) if not _is_batch_norm(module)]


def recompute_units(model: nn.Module, *, every: int = 1, policy: Any = None) -> int:
    """Recompute activations in the first of each `every` units inside `model`; returns the number of these units.

    The outermost unit is left out: its recomputation would keep all activations at once.

    Args:
        every: 1 for all of them.
        policy: selects the operations that run again, as for `recompute`; None for all.
    """
    meant = units_inside(model)[::every]
    for module in meant:
        recompute(module, policy)
    return len(meant)


def compile_units(model: nn.Module) -> None:
    """Compile each unit inside `model` in place, or all of a model that is one unit: gathers stay outside of compiled
    code, and equal blocks share their code."""
    for module in units_inside(model) or [inside(model)]:
        module.compile()


def recompute(module: nn.Module, policy: Any = None) -> None:
    """Let forwards of `module` with gradients save only their inputs, and run again in the backward.

    The recomputation draws the same random numbers, and its writes to buffers, such as running statistics, are
    dropped. Copies and pickles of the module have it, too. Repeated calls have no effect.

    Args:
        policy: selects the operations that save their results: `policy_fn` of
            `torch.utils.checkpoint.create_selective_checkpoint_contexts`; None for none of them.
    """
    if not is_recomputed(module):
        module.forward = _RecomputedForward(module, module.__dict__.get("forward"), policy)


def is_recomputed(module: nn.Module) -> bool:
    """Whether `recompute` was called for `module`."""
    return isinstance(module.__dict__.get("forward"), _RecomputedForward)


class _RecomputedForward:
    """The forward of a module, with a weak reference to it: a cycle would keep the memory of a deleted model."""

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None, policy: Any = None) -> None:
        self._module = weakref.ref(module)
        self._own = own
        self._policy = policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "it is called by its module"
        forward = self._own or MethodType(type(module).forward, module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        buffers = _buffers_of(module)
        contexts = partial(_first_and_again, buffers, self._policy) if buffers or self._policy else noop_context_fn
        # Keywords are bound, so that they are not taken for those of checkpoint().
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=contexts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _RecomputedForward, (self._module(), self._own, self._policy)


# A buffer, and the dtype in which the first run read it: the unit may have cast it for that run only.
_Buffers = list[tuple[nn.Module, str, torch.dtype]]


def _buffers_of(module: nn.Module) -> _Buffers:
    return [
        (each, name, buffer.dtype) for each in module.modules() for name, buffer in each.named_buffers(recurse=False)
    ]


def _first_and_again(buffers: _Buffers, policy: Any) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    if policy is None:
        return nullcontext(), _copies_of(buffers)
    first, again = create_selective_checkpoint_contexts(policy)
    return first, _both(_copies_of(buffers), again)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@contextmanager
def _copies_of(buffers: _Buffers) -> Iterator[None]:
    """Inside, buffers are replaced by copies: a recomputed batch norm would count the same batch twice."""
    originals = [getattr(module, name) for module, name, _ in buffers]
    try:
        for (module, name, dtype), original in zip(buffers, originals, strict=True):
            setattr(module, name, original.to(dtype, copy=True))
        yield
    finally:
        for (module, name, _), original in zip(buffers, originals, strict=True):
            setattr(module, name, original)


def _is_batch_norm(module: nn.Module) -> bool:
    return getattr(module, "track_running_stats", False) is True
