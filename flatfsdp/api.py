"""What a user hands in: the public enums and configs, and every check of arguments that needs no process group.

Names, integer values, fields, defaults and their order equal FSDP1's, so that programs and saved configs carry over.
:func:`check_arguments` is the one door: what is unambiguous is accepted and normalised (the name of an enum's member,
a dtype, a bool, a collection of module classes, torch's own enums, configs and policies), the rest is refused in words
that name the argument, what was given and what is accepted. Behind it code reads a :class:`Config` and asks no more.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from flatfsdp.errors import ConfigTypeError, ConfigValueError, UsageError, warn

__all__ = ["BackwardPrefetch", "CPUOffload", "MixedPrecision", "ShardingStrategy", "TrainingState"]


class ShardingStrategy(Enum):
    """What is sharded, over which ranks, and for how long a unit's parameters stay unsharded.

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


class BackwardPrefetch(Enum):
    """When, in backward, the next unit's all-gather is issued; ``None`` in its place means when that unit is reached.

    ``BACKWARD_PRE``: before this unit's gradients are computed. The most overlap, and two units' parameters plus one
    unit's gradients alive at once. ``BACKWARD_POST``: after they are computed and this unit's parameters are freed.
    Less overlap, one unit's parameters less at the peak.
    """

    BACKWARD_PRE = 1
    BACKWARD_POST = 2


class TrainingState(Enum):
    """What a wrapper is doing, as other programs read it from ``FullyShardedDataParallel.training_state``."""

    IDLE = 1
    FORWARD_BACKWARD = 2
    SUMMON_FULL_PARAMS = 3


# Every batch norm derives from this class, which torch gives no public name: the first base of a public one is it.
_BATCH_NORM: type[nn.Module] = nn.BatchNorm1d.mro()[1]


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a unit: in computation, in reduction, and of its buffers. Only floating-point tensors are cast.

    The optimizer always sees sharded parameters, and unless ``keep_low_precision_grads`` sharded gradients, in the
    dtype that the module had when it was wrapped.

    Raises:
        ConfigTypeError, ConfigValueError: at construction, for a field that is no floating-point dtype, bool, or
            collection of module classes.
    """

    param_dtype: torch.dtype | None = None
    """Dtype of the unsharded parameters, hence of forward and backward. None: as they are."""

    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are summed across ranks. None: ``param_dtype``, and where that is None, as they are."""

    buffer_dtype: torch.dtype | None = None
    """Dtype of the buffers in computation. None: as they are."""

    keep_low_precision_grads: bool = False
    """Leave reduced gradients in the reduce dtype, for an optimizer that can step on them."""

    cast_forward_inputs: bool = False
    """Cast the inputs of this unit's forward to ``param_dtype``. For the root the next field decides as well."""

    cast_root_forward_inputs: bool = True
    """Cast the inputs of the root's forward to ``param_dtype``; without effect on units that are not the root."""

    _module_classes_to_ignore: tuple[type[nn.Module], ...] = (_BATCH_NORM,)
    """Modules of these classes become units of their own in full precision, where an ``auto_wrap_policy`` is given."""

    accumulate_dtype: torch.dtype | None = None
    """Dtype in which unsharded gradients add up under ``no_sync``. None: the reduce dtype. Not in torch's FSDP."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "accumulate_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not isinstance(dtype, torch.dtype):
                _refuse_type(f"MixedPrecision.{name}", dtype, "a floating-point torch.dtype, or None")
            if dtype is not None and not dtype.is_floating_point:
                _refuse_value(f"MixedPrecision.{name}", dtype, "a floating-point torch.dtype, or None")
        for name in ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"):
            _check_bool(f"MixedPrecision.{name}", getattr(self, name))
        ignored = "MixedPrecision._module_classes_to_ignore"
        object.__setattr__(self, ignored.rpartition(".")[2], _module_classes(ignored, self._module_classes_to_ignore))


@dataclass(frozen=True)
class CPUOffload:
    """Where shards rest between uses.

    Raises:
        ConfigTypeError: at construction, for a field that is no bool.
    """

    offload_params: bool = False
    """Keep sharded parameters and sharded gradients in CPU memory; the optimizer steps there."""

    pin_memory: bool = True
    """Page-lock that memory where there is an accelerator, so that copies overlap. Not in torch's FSDP."""

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_bool(f"CPUOffload.{field.name}", getattr(self, field.name))


@dataclass(frozen=True)
class Config:
    """The arguments of a wrapper, checked and normalised by :func:`check_arguments`."""

    process_group: Any
    """None, a process group, or the pair (shard group, replicate group)."""
    sharding_strategy: ShardingStrategy
    cpu_offload: CPUOffload
    auto_wrap_policy: Callable[..., Any] | frozenset[type[nn.Module]] | Any | None
    """None, a callable (module=, recurse=, nonwrapped_numel=), an object with ``_run_policy``, or module classes."""
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision
    ignored_modules: tuple[nn.Module, ...]
    """Given as ``ignored_modules``, or as ``ignored_states`` that are modules."""
    ignored_params: tuple[nn.Parameter, ...]
    """Given as ``ignored_states`` that are parameters."""
    param_init_fn: Callable[[nn.Module], Any] | None
    device_id: int | torch.device | None
    """An int is an index among the accelerators of the machine, whatever their kind."""
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    device_mesh: Any
    check_values: str
    """What differing initial values across ranks lead to: "warn", "raise", or "off" (not compared)."""

    def replace(self, **changes: Any) -> Config:
        """A copy with the given fields changed; the values must be normalised already."""
        return replace(self, **changes)


def check_arguments(
    module: nn.Module,
    *,
    process_group: Any = None,
    sharding_strategy: Any = None,
    cpu_offload: Any = None,
    auto_wrap_policy: Any = None,
    backward_prefetch: Any = BackwardPrefetch.BACKWARD_PRE,
    mixed_precision: Any = None,
    ignored_modules: Any = None,
    param_init_fn: Any = None,
    device_id: Any = None,
    sync_module_states: Any = False,
    forward_prefetch: Any = False,
    limit_all_gathers: Any = True,
    use_orig_params: Any = False,
    ignored_states: Any = None,
    device_mesh: Any = None,
    check_values: Any = "warn",
) -> Config:
    """Check the arguments of ``FullyShardedDataParallel`` and return them normalised. Never communicates.

    Raises:
        ConfigTypeError, ConfigValueError: naming the argument, what was given, and what is accepted.
        UsageError: ``module`` is a container whose forward is never called.
    """
    _check_module(module)
    strategy = _member("sharding_strategy", sharding_strategy, ShardingStrategy) or ShardingStrategy.FULL_SHARD
    modules, params = _ignored(module, ignored_modules, ignored_states)
    policy = _policy(auto_wrap_policy)
    for name, flag in (
        ("sync_module_states", sync_module_states),
        ("forward_prefetch", forward_prefetch),
        ("limit_all_gathers", limit_all_gathers),
        ("use_orig_params", use_orig_params),
    ):
        _check_bool(name, flag)
    config = Config(
        process_group=_process_group(process_group, strategy),
        sharding_strategy=strategy,
        cpu_offload=_cpu_offload(cpu_offload),
        auto_wrap_policy=policy,
        backward_prefetch=_member("backward_prefetch", backward_prefetch, BackwardPrefetch),
        mixed_precision=_mixed_precision(mixed_precision),
        ignored_modules=modules,
        ignored_params=params,
        param_init_fn=_param_init_fn(param_init_fn),
        device_id=_device_id(device_id),
        sync_module_states=sync_module_states,
        forward_prefetch=forward_prefetch,
        limit_all_gathers=limit_all_gathers,
        use_orig_params=use_orig_params,
        device_mesh=_device_mesh(device_mesh, strategy),
        check_values=_check_values(check_values),
    )
    _check_combination(config)
    return config


def check_argument_names(given: Mapping[str, Any], *, where: str) -> None:
    """Refuse keys of ``given`` that are no arguments of a wrapper, as ``where`` (a policy, a context) provides them.

    Raises:
        ConfigTypeError: naming the first such key and the argument probably meant.
    """
    accepted = [name for name in inspect.signature(check_arguments).parameters if name != "module"]
    for name in given:
        if name not in accepted:
            raise ConfigTypeError(
                f"{where}: {name!r} is no argument of FullyShardedDataParallel.{_did_you_mean(name, accepted)} "
                f"Accepted: {', '.join(accepted)}."
            )


def has_forward(module: nn.Module) -> bool:
    """Whether ``module`` can be called: containers such as ``ModuleList`` define no forward of their own."""
    # Static: on a class of torch.jit the plain attribute is a descriptor that fails without an instance.
    return inspect.getattr_static(module, "forward") is not nn.Module.forward


# --- One function an argument ------------------------------------------------------------------------------------------


def _check_module(module: Any) -> None:
    if isinstance(module, type) and issubclass(module, nn.Module):
        _refuse_type("module", module, "an instance of nn.Module", hint=f"Build one first: {module.__name__}(...).")
    if not isinstance(module, nn.Module):
        _refuse_type("module", module, "an nn.Module")
    if not has_forward(module):
        raise UsageError(
            f"module: {type(module).__name__} defines no forward, so its wrapper would never be called and its "
            "parameters never gathered. Wrap the modules inside it, or the module that calls them."
        )


def _process_group(value: Any, strategy: ShardingStrategy) -> Any:
    hybrid = strategy in _HYBRID
    accepted = (
        f"None, or a pair (shard group, replicate group), for {strategy.name}"
        if hybrid
        else f"None, or one torch.distributed.ProcessGroup, for {strategy.name}"
    )
    if value is None:
        return None
    if isinstance(value, (tuple, list)) and all(_is_group(group) for group in value):
        if not hybrid:
            raise ConfigValueError(
                f"process_group: got {len(value)} process groups. Accepted: {accepted}. "
                "A pair belongs to the strategies HYBRID_SHARD and _HYBRID_SHARD_ZERO2."
            )
        if len(value) != 2:
            raise ConfigValueError(f"process_group: got {len(value)} process groups. Accepted: {accepted}.")
        return tuple(value)
    if _is_group(value):
        if hybrid:
            raise ConfigValueError(f"process_group: got a single process group. Accepted: {accepted}.")
        return value
    hint = "torch.distributed.new_group answers so on ranks outside of the group." if value == -100 else ""
    _refuse_type("process_group", value, accepted, hint=hint)


def _is_group(value: Any) -> bool:
    return callable(getattr(value, "rank", None)) and callable(getattr(value, "size", None))


def _device_mesh(value: Any, strategy: ShardingStrategy) -> Any:
    if value is None:
        return None
    hybrid = strategy in _HYBRID
    accepted = f"None, or a {'2-D' if hybrid else '1-D or 2-D'} DeviceMesh, for {strategy.name}"
    if not (isinstance(getattr(value, "ndim", None), int) and callable(getattr(value, "get_group", None))):
        _refuse_type("device_mesh", value, accepted)
    if value.ndim not in ((2,) if hybrid else (1, 2)):
        hint = " Its axes are (replicate, shard)." if hybrid else ""
        raise ConfigValueError(f"device_mesh: got a {value.ndim}-D mesh. Accepted: {accepted}.{hint}")
    return value


def _cpu_offload(value: Any) -> CPUOffload:
    if value is None or isinstance(value, bool):
        return CPUOffload(offload_params=bool(value))
    return _own(value, CPUOffload) or _refuse_type("cpu_offload", value, "None, a bool, or a CPUOffload")


def _mixed_precision(value: Any) -> MixedPrecision:
    """A bare dtype is the param dtype alone: gradients are then reduced in it too, as for any MixedPrecision."""
    if value is None or isinstance(value, torch.dtype):
        return MixedPrecision(param_dtype=value)
    return _own(value, MixedPrecision) or _refuse_type(
        "mixed_precision", value, "None, a floating-point torch.dtype (the param_dtype), or a MixedPrecision"
    )


def _policy(value: Any) -> Any:
    argument = "auto_wrap_policy"
    if value is None or (callable(getattr(value, "_run_policy", None)) and not isinstance(value, type)):
        return value
    if isinstance(value, type) and issubclass(value, nn.Module):
        return frozenset({value})
    if isinstance(value, (set, frozenset, list, tuple)):
        classes = frozenset(_module_classes(argument, value))
        return classes or _refuse_value(argument, value, "at least one class, or None to wrap no submodules")
    if isinstance(value, type) or not callable(value):
        _refuse_type(
            argument,
            value,
            "None, a policy of flatfsdp.wrap, a callable (module, recurse, nonwrapped_numel) -> bool, "
            "or a set of module classes",
        )
    return _policy_function(argument, value)


def _policy_function(argument: str, policy: Callable[..., Any]) -> Callable[..., Any]:
    try:
        signature = inspect.signature(policy)
    except ValueError:  # a builtin or an extension's function: known only when called
        return policy
    try:
        signature.bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError as missing:
        try:
            signature.bind(None, True, 0)
        except TypeError:
            raise ConfigTypeError(
                f"{argument}: {_shown(policy)} cannot be called as policy(module=..., recurse=..., "
                f"nonwrapped_numel=...): {missing}. Fix its other arguments with functools.partial."
            ) from None
        return lambda module, recurse, nonwrapped_numel: policy(module, recurse, nonwrapped_numel)
    return policy


def _ignored(
    module: nn.Module, ignored_modules: Any, ignored_states: Any
) -> tuple[tuple[nn.Module, ...], tuple[nn.Parameter, ...]]:
    if ignored_modules is not None and ignored_states is not None:
        raise ConfigValueError(
            "ignored_modules, ignored_states: got both. Accepted: one of them; ignored_states takes modules as well."
        )
    modules = _elements("ignored_modules", ignored_modules, (nn.Module,), "nn.Module instances")
    either = (nn.Module, nn.Parameter)
    states = _elements("ignored_states", ignored_states, either, "nn.Parameter or nn.Module instances")
    of_states = tuple(state for state in states if isinstance(state, nn.Module))
    params = tuple(state for state in states if isinstance(state, nn.Parameter))
    if of_states and params:
        raise ConfigValueError(
            f"ignored_states: got {len(params)} parameters and {len(of_states)} modules. "
            "Accepted: all parameters, or all modules. Add the modules' own parameters to the parameters."
        )
    if module in (ignored := modules + of_states):
        raise ConfigValueError(
            f"{'ignored_modules' if modules else 'ignored_states'}: got the very module to be wrapped "
            f"({type(module).__name__}), which would leave nothing to shard. Accepted: modules inside it."
        )
    return ignored, params


def _elements(argument: str, value: Any, kinds: tuple[type, ...], accepted: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, kinds):  # some modules, and all parameters, are iterable: a single one means itself
        return (value,)
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        _refuse_type(argument, value, f"None, or an iterable of {accepted}")
    elements = tuple(value)
    for position, element in enumerate(elements):
        if not isinstance(element, kinds):
            hint = "Pass the objects themselves, not their names." if isinstance(element, str) else ""
            _refuse_type(f"{argument}[{position}]", element, accepted, hint=hint)
    return elements


def _param_init_fn(value: Any) -> Any:
    if value is not None and (not callable(value) or isinstance(value, type)):
        _refuse_type("param_init_fn", value, "None, or a callable (module) -> None")
    return value


def _device_id(value: Any) -> int | torch.device | None:
    accepted = 'None, the index of an accelerator, a torch.device, or its name such as "cuda:0"'
    if isinstance(value, bool) or not isinstance(value, (int, str, torch.device, type(None))):
        _refuse_type("device_id", value, accepted)
    if isinstance(value, int) and value < 0:
        _refuse_value("device_id", value, accepted)
    if isinstance(value, str):
        try:
            value = torch.device(value)
        except RuntimeError:
            _refuse_value("device_id", value, accepted)
    if isinstance(value, torch.device) and value.type == "meta":
        _refuse_value("device_id", value, accepted, hint="Nothing can be computed on the meta device.")
    return value


def _check_values(value: Any) -> str:
    choices = ("warn", "raise", "off")
    accepted = ", ".join(f'"{choice}"' for choice in choices)
    if not isinstance(value, str):
        _refuse_type("check_values", value, accepted)
    if value not in choices:
        _refuse_value("check_values", value, accepted, hint=_did_you_mean(value, choices))
    return value


_HYBRID = frozenset({ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2})


def _check_combination(config: Config) -> None:
    """What no argument shows alone: combinations that cannot work, and those that quietly do less than they say."""
    strategy, precision = config.sharding_strategy, config.mixed_precision
    if config.process_group is not None and config.device_mesh is not None:
        raise ConfigValueError("process_group, device_mesh: got both. Accepted: one of them.")
    if strategy in _HYBRID and config.process_group is config.device_mesh is config.auto_wrap_policy is None:
        raise ConfigValueError(
            f"sharding_strategy: got {strategy.name} without process_group, device_mesh or auto_wrap_policy. Units "
            "wrapped one by one would each make groups of their own. Accepted: a pair (shard group, replicate group) "
            "as process_group, a 2-D device_mesh, or an auto_wrap_policy, whose units share one pair."
        )
    if strategy not in _HYBRID and config.device_mesh is not None and config.device_mesh.ndim == 2:
        warn(
            f"device_mesh: {strategy.name} uses only axis 0 of a 2-D mesh; ranks along axis 1 exchange nothing here. "
            "If that is meant (tensor parallelism), pass the 1-D mesh of that axis; to replicate, use HYBRID_SHARD."
        )
    if strategy is ShardingStrategy.NO_SHARD and config.forward_prefetch:
        warn("forward_prefetch: True has no effect with NO_SHARD, which never gathers parameters.")
    if precision.keep_low_precision_grads and precision.param_dtype is precision.reduce_dtype is None:
        warn(
            "mixed_precision: keep_low_precision_grads=True has no effect while param_dtype and reduce_dtype are None: "
            "there are no low-precision gradients to keep."
        )
    if precision.param_dtype in (torch.float16, torch.bfloat16) and precision.reduce_dtype is None:
        warn(
            f"mixed_precision: param_dtype={precision.param_dtype} with reduce_dtype=None sums gradients across ranks "
            f"in {precision.param_dtype} too, and small ones get lost as ranks are added. Pass reduce_dtype=torch.float32 "
            f"for full-precision sums, or reduce_dtype={precision.param_dtype} to keep this one without the warning."
        )


# --- What the checks share ---------------------------------------------------------------------------------------------

_EnumT = TypeVar("_EnumT", bound=Enum)
_ConfigT = TypeVar("_ConfigT", MixedPrecision, CPUOffload)


def _member(argument: str, value: Any, kind: type[_EnumT]) -> _EnumT | None:
    """``value`` as a member of ``kind``: given as such, by name in any case, or as torch's member of the same name."""
    if value is None or isinstance(value, kind):
        return value
    names = list(kind.__members__)
    accepted = f"None, a {kind.__name__}, or its name ({', '.join(names)})"
    if isinstance(value, Enum) and type(value).__name__ == kind.__name__:
        value = value.name
    if not isinstance(value, str):
        _refuse_type(argument, value, accepted)
    for name in names:
        if value.upper().lstrip("_") == name.lstrip("_"):
            return kind[name]
    _refuse_value(argument, value, accepted, hint=_did_you_mean(value.upper(), names))


def _own(value: Any, kind: type[_ConfigT]) -> _ConfigT | None:
    """``value`` as one of our configs: given as such, or torch's of the same name, field by field; else None."""
    if isinstance(value, kind):
        return value
    if isinstance(value, type) or type(value).__name__ != kind.__name__:
        return None
    return kind(**{field.name: getattr(value, field.name) for field in fields(kind) if hasattr(value, field.name)})


def _check_bool(argument: str, value: Any) -> None:
    if not isinstance(value, bool):
        _refuse_type(argument, value, "True or False")


def _module_classes(argument: str, value: Any) -> tuple[type[nn.Module], ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        _refuse_type(argument, value, "a collection of module classes")
    classes = tuple(value)
    for element in classes:
        if not (isinstance(element, type) and issubclass(element, nn.Module)):
            hint = ""
            if isinstance(element, nn.Module):
                hint = f"Pass its class, {type(element).__name__}."
            elif isinstance(element, str):
                hint = "Pass the class itself, not its name."
            _refuse_type(argument, element, "a collection of module classes", hint=hint)
    return classes


def _refuse_type(argument: str, value: Any, accepted: str, *, hint: str = "") -> NoReturn:
    raise ConfigTypeError(f"{argument}: got {_shown(value)}. Accepted: {accepted}.{hint and ' ' + hint.strip()}")


def _refuse_value(argument: str, value: Any, accepted: str, *, hint: str = "") -> NoReturn:
    raise ConfigValueError(f"{argument}: got {value!r}. Accepted: {accepted}.{hint and ' ' + hint.strip()}")


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text, kind = repr(value), type(value).__name__
    if hasattr(value, "__name__"):
        return f"the {kind} {value.__name__}"
    short = len(text) <= 60 and "\n" not in text and " at 0x" not in text
    return f"{text} ({kind})" if short else f"a value of type {kind}"


def _did_you_mean(name: str, accepted: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(accepted), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
