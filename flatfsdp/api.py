"""Configuration by the user: FSDP1's public enums and configs, and the :class:`Config` that a wrapper reads.

Names, integer values, fields, defaults and their order equal FSDP1's, so that programs and saved configs carry over.
A config checks its fields at construction; a wrapper's arguments are checked, and turned into a :class:`Config`, in
``engine/config/arguments.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from .errors import ConfigValueError, refuse_type, refuse_value

__all__ = ["BackwardPrefetch", "CPUOffload", "MixedPrecision", "ShardingStrategy", "TrainingState"]


class ShardingStrategy(Enum):
    """Which tensors are sharded, over which ranks, and how long a unit's parameters stay unsharded.

    ============================  =========================  ==============================  ==========================
    member                        parameters at rest         unsharded parameters live       gradients are reduced by
    ============================  =========================  ==============================  ==========================
    ``FULL_SHARD``                1/W per rank               during forward, and again       reduce-scatter
                                                             during backward
    ``SHARD_GRAD_OP``             1/W per rank               from forward through backward   reduce-scatter
    ``NO_SHARD``                  whole on every rank        always                          all-reduce
    ``HYBRID_SHARD``              1/S per rank of a shard    as ``FULL_SHARD``               reduce-scatter in the shard
                                  group                                                      group, all-reduce across
                                                                                             the replicate group
    ``_HYBRID_SHARD_ZERO2``       as ``HYBRID_SHARD``        as ``SHARD_GRAD_OP``            as ``HYBRID_SHARD``
    ============================  =========================  ==============================  ==========================
    """

    FULL_SHARD = 1
    SHARD_GRAD_OP = 2
    NO_SHARD = 3
    HYBRID_SHARD = 4
    _HYBRID_SHARD_ZERO2 = 5


JOIN_UNITS_BELOW = 2**20

HYBRIDS = frozenset({ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2})


class BackwardPrefetch(Enum):
    """When the next unit's all-gather is issued in backward; ``None`` instead of a member: when that unit is reached.

    ``BACKWARD_PRE``: before this unit's gradients are computed. It overlaps most, and holds two units' parameters plus
    one unit's gradients at once. ``BACKWARD_POST``: after they are computed and this unit's parameters are freed. It
    overlaps less, and its peak is lower by one unit's parameters. ``BACKWARD_MID``: when half of the gradients (by
    elements) are computed, and the reduction of the previous unit has read its gradients. Each overlaps with half of a
    unit's backward, and two units are unsharded at once, in use, prefetched or being reduced, where ``BACKWARD_PRE``
    has three; units around them add to that, and the last one does not overlap. Not in torch's FSDP.
    """

    BACKWARD_PRE = 1
    BACKWARD_POST = 2
    BACKWARD_MID = 3


class Unnamed:
    """A default ``value``, which the user did not give. Shown like it."""

    def __init__(self, value: Enum) -> None:
        self.value, self.name = value, value.name

    def __repr__(self) -> str:
        return str(self.value)


def value_of(given: Any) -> Any:
    """``given``, or the value of a default."""
    return given.value if isinstance(given, Unnamed) else given


DEFAULT_PREFETCH: Any = Unnamed(BackwardPrefetch.BACKWARD_PRE)  # the default of ``backward_prefetch``


class TrainingState(Enum):
    """The state of a wrapper, which other programs read from ``FullyShardedDataParallel.training_state``."""

    IDLE = 1
    FORWARD_BACKWARD = 2
    SUMMON_FULL_PARAMS = 3


# Every batch norm derives from this class, which has no public name in torch: it is the first base of a public one.
_BATCH_NORM: type[nn.Module] = nn.BatchNorm1d.mro()[1]


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a unit: in computation, in reduction, and of its buffers. Only floating-point tensors are cast.

    The optimizer always sees sharded parameters in the dtype that the module had when it was wrapped, and sharded
    gradients, too, unless ``keep_low_precision_grads`` is set.

    Raises:
        ConfigTypeError, ConfigValueError: at construction, for a field that is not a floating-point dtype, a bool, or a
            collection of module classes, as required.
    """

    param_dtype: torch.dtype | None = None
    """Dtype of the unsharded parameters, hence of forward and backward. None: unchanged."""

    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are summed across ranks. None: ``param_dtype`` or, if that is None, unchanged."""

    buffer_dtype: torch.dtype | None = None
    """Dtype of the buffers in computation. None: unchanged."""

    keep_low_precision_grads: bool = False
    """Leave reduced gradients in the reduce dtype, for an optimizer that can step on them."""

    cast_forward_inputs: bool = False
    """Cast the inputs of this unit's forward to ``param_dtype``. For the root, the next field applies instead."""

    cast_root_forward_inputs: bool = True
    """Cast the inputs of the root's forward to ``param_dtype``; without effect on units that are not the root."""

    _module_classes_to_ignore: tuple[type[nn.Module], ...] = (_BATCH_NORM,)
    """Modules of these classes become units of their own in full precision, if an ``auto_wrap_policy`` is given."""

    accumulate_dtype: torch.dtype | None = None
    """Dtype in which unsharded gradients accumulate under ``no_sync``. None: the reduce dtype. Not in torch's FSDP."""

    full_precision_in_eval: bool = False
    """Compute in the master dtype, without casts, while the module is in eval mode. Not in torch's FSDP."""

    gather_dtype: torch.dtype | None = None
    """Dtype of parameters in all-gathers: ``torch.int8`` or ``torch.float8_e4m3fn``, in blocks of
    256 numbers with a scale each, a quarter of float32. Shards keep full precision. Parameters that are not floating
    point are sent unchanged. None: ``param_dtype``. Not in torch's FSDP."""

    reduce_bits: int | None = None
    """Bits of a number in reductions of gradients: 8 or 4, a quarter or an eighth of float32, in blocks of 256 numbers
    with a scale each. A rank sums the received numbers in float32, in the order of ranks, and casts to
    ``reduce_dtype``; sums are sent across replicas in the same way. None: ``reduce_dtype``. Not in torch's FSDP."""

    reduce_error_feedback: bool = False
    """Add the errors of earlier reductions on this rank to the gradients that are sent in ``reduce_bits``: the error of
    a sum over steps is that of one step. The errors are kept on the device, in the ``reduce_dtype``: for a unit with
    shards of n numbers on S ranks, ``(S - 1) * n`` numbers, and n more if there are replicas. Not in torch's FSDP."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "accumulate_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not isinstance(dtype, torch.dtype):
                refuse_type(f"MixedPrecision.{name}", dtype, "a floating-point torch.dtype, or None")
            if dtype is not None and not dtype.is_floating_point:
                refuse_value(f"MixedPrecision.{name}", dtype, "a floating-point torch.dtype, or None")
        if self.gather_dtype is not None:
            _check_gathered(self.gather_dtype)
        bits, accepted = self.reduce_bits, "None, 8 or 4"
        if bits is not None and (isinstance(bits, bool) or not isinstance(bits, int)):
            refuse_type("MixedPrecision.reduce_bits", bits, accepted)
        if bits not in (None, 8, 4):
            refuse_value("MixedPrecision.reduce_bits", bits, accepted)
        for name in (
            "keep_low_precision_grads",
            "cast_forward_inputs",
            "cast_root_forward_inputs",
            "full_precision_in_eval",
            "reduce_error_feedback",
        ):
            check_bool(f"MixedPrecision.{name}", getattr(self, name))
        if self.reduce_error_feedback and bits is None:
            raise ConfigValueError(
                "MixedPrecision: got reduce_error_feedback=True without reduce_bits. Accepted: with reduce_bits=8 or "
                "reduce_bits=4; reductions in the reduce_dtype leave no quantization errors to compensate."
            )
        ignored = "MixedPrecision._module_classes_to_ignore"
        if self.gather_dtype is not None and self.full_precision_in_eval:
            raise ConfigValueError(
                f"MixedPrecision: got gather_dtype={self.gather_dtype} and full_precision_in_eval=True. Accepted: one "
                "of them; parameters that were gathered in gather_dtype do not have full precision."
            )
        object.__setattr__(
            self, ignored.rpartition(".")[2], check_module_classes(ignored, self._module_classes_to_ignore)
        )


def _check_gathered(dtype: Any) -> None:
    name, accepted = "MixedPrecision.gather_dtype", "None, torch.int8 or torch.float8_e4m3fn"
    if not isinstance(dtype, torch.dtype):
        refuse_type(name, dtype, accepted)
    if dtype not in (torch.int8, torch.float8_e4m3fn):
        casts = dtype in (torch.bfloat16, torch.float16)
        refuse_value(name, dtype, accepted, hint=f"To gather in {dtype}, pass it as the param_dtype." if casts else "")


@dataclass(frozen=True)
class CPUOffload:
    """The placement of shards between uses.

    Raises:
        ConfigTypeError: at construction, for a field that is not a bool.
    """

    offload_params: bool = False
    """Keep sharded parameters and sharded gradients in CPU memory; the optimizer steps there."""

    pin_memory: bool = True
    """Page-lock that memory if there is an accelerator, so that copies overlap. Not in torch's FSDP."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_bool(f"CPUOffload.{field.name}", getattr(self, field.name))


@dataclass(frozen=True)
class Config:
    """The arguments of a wrapper, checked and normalized; made by ``check_arguments``."""

    process_group: Any
    """None, a process group, or the pair (shard group, replicate group)."""
    sharding_strategy: ShardingStrategy
    cpu_offload: CPUOffload
    auto_wrap_policy: Callable[..., Any] | frozenset[type[nn.Module]] | Any | None
    """None, a callable (module=, recurse=, nonwrapped_numel=), an object with ``_run_policy``, or module classes."""
    backward_prefetch: BackwardPrefetch | None
    names_prefetch: bool
    """Whether the user gave ``backward_prefetch``, which is then followed without early waits."""
    mixed_precision: MixedPrecision
    ignored_modules: tuple[nn.Module, ...]
    """Given as ``ignored_modules``, or as ``ignored_states`` that are modules."""
    ignored_params: tuple[nn.Parameter, ...]
    """Given as ``ignored_states`` that are parameters."""
    param_init_fn: Callable[[nn.Module], Any] | None
    device_id: int | torch.device | None
    """An int is an index among the accelerators of the machine, of any kind."""
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    device_mesh: Any
    reshard_after_forward: bool | int | None
    """None leaves it to the strategy; a number is compared with that of shards when groups are known."""
    check_values: str
    """The reaction to differing initial values across ranks: "warn", "raise", or "off" (not compared)."""
    join_units_below: int
    """Bytes of unsharded parameters up to which consecutive units share their collectives; 0 for none."""
    layout: Any
    """ "flat" or "rows": whether ranks split the parameters of a unit as one flat parameter, or each of them by rows.
    Or the grains of parameters, for which a layout is planned: as given until the outermost wrapper resolves them."""
    deterministic_sums: bool
    """Whether sums of gradients have the same bits on any number of ranks, over the microbatches that users name."""

    def replace(self, **changes: Any) -> Config:
        """A copy with the given fields changed; the values must be normalized already."""
        return replace(self, **changes)


def check_bool(argument: str, value: Any) -> None:
    """Refuse ``value`` with a ConfigTypeError unless it is a bool: 1 and "yes" are not."""
    if not isinstance(value, bool):
        refuse_type(argument, value, "True or False")


def check_number(argument: str, value: Any, accepted: str, least: int) -> int:
    """``value``, an integer of at least ``least``; all other values are refused, bools included."""
    if isinstance(value, bool) or not isinstance(value, int):
        refuse_type(argument, value, accepted)
    if value < least:
        refuse_value(argument, value, accepted)
    return value


def check_module_classes(argument: str, value: Any) -> tuple[type[nn.Module], ...]:
    """``value``, a module class or a collection of them, as a tuple; a ConfigTypeError for other values."""
    if isinstance(value, type):
        value = (value,)
    if isinstance(value, str) or not isinstance(value, Iterable):
        refuse_type(argument, value, "a collection of module classes")
    classes = tuple(value)
    for element in classes:
        if not (isinstance(element, type) and issubclass(element, nn.Module)):
            hint = ""
            if isinstance(element, nn.Module):
                hint = f"Pass its class, {type(element).__name__}."
            elif isinstance(element, str):
                hint = "Pass the class itself, not its name."
            refuse_type(argument, element, "a collection of module classes", hint=hint)
    return classes
