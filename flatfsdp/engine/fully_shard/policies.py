"""The policies of `fully_shard`, with FSDP2's names and fields. torch's own are recognized by their fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...api import CPUOffload, MixedPrecision, check_bool
from ...errors import refuse_type, refuse_value
from ..config.arguments import own

_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of modules that are sharded together. Only floating-point tensors are cast.

    Optimizers see parameters and gradients in the dtype that the module has.

    Raises:
        ConfigTypeError, ConfigValueError: at construction, for a field that is not a floating-point dtype, or a bool.
    """

    param_dtype: torch.dtype | None = None
    """Dtype of the unsharded parameters, hence of forward and backward. None: unchanged."""

    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are summed across ranks. None: `param_dtype` or, if that is None, unchanged."""

    output_dtype: torch.dtype | None = None
    """Dtype to which the outputs of each module's forward are cast. None: unchanged."""

    cast_forward_inputs: bool = True
    """Cast the inputs of each module's forward to `param_dtype`."""

    def __post_init__(self) -> None:
        for name in _DTYPES:
            dtype = getattr(self, name)
            accepted = "a floating-point torch.dtype, or None"
            if dtype is not None and not isinstance(dtype, torch.dtype):
                refuse_type(f"MixedPrecisionPolicy.{name}", dtype, accepted)
            if dtype is not None and not dtype.is_floating_point:
                refuse_value(f"MixedPrecisionPolicy.{name}", dtype, accepted)
        check_bool("MixedPrecisionPolicy.cast_forward_inputs", self.cast_forward_inputs)


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and optimizer states live in host memory, where the optimizer steps.

    Raises:
        ConfigTypeError: at construction, `pin_memory` is not a bool.
    """

    pin_memory: bool = True
    """Page-lock that memory if there is an accelerator, so that copies overlap with computation."""

    def __post_init__(self) -> None:
        check_bool("CPUOffloadPolicy.pin_memory", self.pin_memory)


def precision_of(policy: Any) -> tuple[Any, MixedPrecision, torch.dtype | None]:
    """The settings of `policy` for a unit, with FSDP2's fields and in the engine's form, and the dtype of outputs."""
    if policy is None:
        policy = MixedPrecisionPolicy()
    if (whole := own(policy, MixedPrecision)) is not None:  # the wrapper's
        casts = whole.cast_forward_inputs
        return MixedPrecisionPolicy(whole.param_dtype, whole.reduce_dtype, None, casts), whole, None
    if isinstance(policy, type) or not all(hasattr(policy, name) for name in (*_DTYPES, "cast_forward_inputs")):
        refuse_type("mp_policy", policy, "a MixedPrecisionPolicy, ours or torch's, or a MixedPrecision")
    checked = MixedPrecisionPolicy(
        policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs
    )
    casts = checked.cast_forward_inputs
    precision = MixedPrecision(
        checked.param_dtype, checked.reduce_dtype, cast_forward_inputs=casts, cast_root_forward_inputs=casts
    )
    return policy, precision, checked.output_dtype


def offload_of(policy: Any) -> CPUOffload:
    """The placement of shards that `policy` chooses."""
    name = type(policy).__name__
    if policy is None or isinstance(policy, type) or name not in ("OffloadPolicy", "CPUOffloadPolicy"):
        if policy is not None:
            refuse_type("offload_policy", policy, "an OffloadPolicy or a CPUOffloadPolicy, ours or torch's")
        return CPUOffload()
    return CPUOffload(name == "CPUOffloadPolicy", pin_memory=getattr(policy, "pin_memory", True))
