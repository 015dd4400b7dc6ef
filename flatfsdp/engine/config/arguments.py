"""Validation of all arguments of wrappers that needs no process group.

Unambiguous values are accepted and normalized: the name of an enum's member, a dtype, a bool, a collection of module
classes, torch's own enums, configs and policies (recognized by their names and attributes, so that torch's FSDP is
never imported). For all others an error names the argument, the given value and the accepted ones. All other code reads
a :class:`Config`, and does not validate it again.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ...api import (
    DEFAULT_PREFETCH,
    HYBRIDS,
    JOIN_UNITS_BELOW,
    BackwardPrefetch,
    Config,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    Unnamed,
    check_bool,
    check_module_classes,
    check_number,
    value_of,
)
from ...errors import ConfigTypeError, ConfigValueError, did_you_mean, refuse_type, refuse_value, shown, warn, warn_once
from . import fsdp1_mode


def check_shardable(path: str, parameter: nn.Parameter) -> None:
    """Raise ConfigValueError for a lazy parameter, which has no shape yet, for one that is not dense, and for one that
    was made in inference mode."""
    if torch.nn.parameter.is_lazy(parameter):
        raise ConfigValueError(
            f"parameter {path!r} is not initialized: it belongs to a lazy module, which sets the shape in its first "
            "forward. Run a forward with inputs of the right size before sharding the model, or exclude that module "
            "(ignored_modules=, ignored_params=)"
        )
    if parameter.layout is not torch.strided:
        raise ConfigValueError(
            f"parameter {path!r} has the layout {parameter.layout}; expected torch.strided, since ranks divide the "
            "memory of parameters among them. Call to_dense() of it before sharding the model, or exclude it "
            "(ignored_modules=, ignored_params=)"
        )
    if parameter.is_inference():
        raise ConfigValueError(
            f"parameter {path!r} was created inside torch.inference_mode(), where tensors have no version counters; "
            "expected one created outside of it. Build the module outside; it may be sharded and called inside"
        )


def check_arguments(
    module: nn.Module,
    *,
    process_group: Any = None,
    sharding_strategy: Any = None,
    cpu_offload: Any = None,
    auto_wrap_policy: Any = None,
    backward_prefetch: Any = DEFAULT_PREFETCH,
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
    reshard_after_forward: Any = None,
    join_units_below: Any = JOIN_UNITS_BELOW,
    layout: Any = "flat",
    deterministic_sums: Any = False,
) -> Config:
    """Check the arguments of ``FullyShardedDataParallel`` and return them normalized. No communication.

    Raises:
        ConfigTypeError, ConfigValueError: names the argument, the given value, and the accepted values.
    """
    strategy = member("sharding_strategy", sharding_strategy, ShardingStrategy) or ShardingStrategy.FULL_SHARD
    modules, params = _ignored(_check_module(module), ignored_modules, ignored_states)
    flags = _bools(
        sync_module_states=sync_module_states,
        forward_prefetch=forward_prefetch,
        limit_all_gathers=limit_all_gathers,
        use_orig_params=use_orig_params,
        deterministic_sums=deterministic_sums,
    )
    config = Config(
        process_group=_process_group(process_group, strategy),
        sharding_strategy=strategy,
        cpu_offload=_cpu_offload(cpu_offload),
        auto_wrap_policy=_policy(auto_wrap_policy),
        backward_prefetch=member("backward_prefetch", value_of(backward_prefetch), BackwardPrefetch),
        names_prefetch=not isinstance(backward_prefetch, Unnamed),
        mixed_precision=_mixed_precision(mixed_precision),
        ignored_modules=modules,
        ignored_params=params,
        param_init_fn=_param_init_fn(param_init_fn),
        device_id=_device_id(device_id),
        **flags,
        device_mesh=_device_mesh(device_mesh, strategy),
        check_values=_one_of("check_values", check_values, "warn", "raise", "off"),
        reshard_after_forward=_reshard_after_forward(reshard_after_forward),
        join_units_below=check_number("join_units_below", join_units_below, "a number of bytes; 0 joins no units", 0),
        layout=_layout(layout),
    )
    return _check_combination(config)


def as_fsdp1(config: Config, module: nn.Module) -> Config:
    """The checked arguments of a wrapper, with FSDP1's behavior under `as_torch`.

    Microbatches add up under `no_sync` in the dtype of the parameters in computation, as autograd adds them in FSDP1.
    (FSDP2 adds them in the reduce dtype, so this is not for `fully_shard`.) Of a module with parameters in several
    dtypes, without `param_dtype`: in the reduce dtype.
    """
    precision = config.mixed_precision
    if not fsdp1_mode.active or precision.accumulate_dtype is not None or precision.reduce_dtype is None:
        return config
    dtypes = {each.dtype for each in module.parameters() if each.is_floating_point()}
    computed = {precision.param_dtype} if precision.param_dtype is not None else dtypes
    if len(computed) != 1:
        return config
    return config.replace(mixed_precision=replace(precision, accumulate_dtype=computed.pop()))


def check_argument_names(given: Mapping[str, Any], *, where: str) -> None:
    """Check that all keys of ``given``, provided by ``where`` (a policy, a context), are arguments of a wrapper.

    Raises:
        ConfigTypeError: names the first key that is not, and the most similar argument.
    """
    for name in given:
        if name not in (accepted := _argument_names()):
            hint = did_you_mean(name, accepted)
            raise ConfigTypeError(
                f"{where}: {name!r} is not an argument of FullyShardedDataParallel. "
                f"Accepted: {', '.join(accepted)}.{hint and ' ' + hint}"
            )


@cache  # needed for every unit, and slow to compute
def _argument_names() -> tuple[str, ...]:
    """The names of the arguments of a wrapper."""
    return tuple(name for name in inspect.signature(check_arguments).parameters if name != "module")


def has_forward(module: nn.Module) -> bool:
    """Whether ``module`` can be called: containers such as ``ModuleList`` define no forward of their own."""
    if "forward" in module.__dict__:
        return True
    try:  # simple enough for torch.compile, which traces it when a complete model is compiled
        return type(module).forward is not nn.Module.forward
    except AttributeError:  # on a class of torch.jit it is a descriptor that fails without an instance
        return True


_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"  # an environment variable of FSDP1


# --- One function per argument ----------------------------------------------------------------------------------------


def _check_module(module: Any) -> nn.Module:
    if isinstance(module, type) and issubclass(module, nn.Module):
        refuse_type(
            "module", module, "an instance of nn.Module", hint=f"Create an instance first: {module.__name__}(...)."
        )
    if not isinstance(module, nn.Module):
        refuse_type("module", module, "an nn.Module")
    return module


def _process_group(value: Any, strategy: ShardingStrategy) -> Any:
    hybrid = strategy in HYBRIDS
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
                f"process_group: got {len(value)} process groups. Accepted: {accepted}. A pair is for the strategies "
                "HYBRID_SHARD and _HYBRID_SHARD_ZERO2."
            )
        if len(value) != 2:
            raise ConfigValueError(f"process_group: got {len(value)} process groups. Accepted: {accepted}.")
        return tuple(value)
    if _is_group(value):
        if hybrid:
            raise ConfigValueError(f"process_group: got a single process group. Accepted: {accepted}.")
        return value
    outside = isinstance(value, int) and value == -100
    hint = "torch.distributed.new_group returns this on ranks outside of the group." if outside else ""
    refuse_type("process_group", value, accepted, hint=hint)


def _is_group(value: Any) -> bool:
    return callable(getattr(value, "rank", None)) and callable(getattr(value, "size", None))


def _device_mesh(value: Any, strategy: ShardingStrategy) -> Any:
    if value is None:
        return None
    hybrid = strategy in HYBRIDS
    accepted = f"None, or a {'2-D' if hybrid else '1-D or 2-D'} DeviceMesh, for {strategy.name}"
    if not (isinstance(getattr(value, "ndim", None), int) and callable(getattr(value, "get_group", None))):
        refuse_type("device_mesh", value, accepted)
    if value.ndim not in ((2,) if hybrid else (1, 2)):
        hint = " Its axes are (replicate, shard)." if hybrid else ""
        raise ConfigValueError(f"device_mesh: got a {value.ndim}-D mesh. Accepted: {accepted}.{hint}")
    return value


def _cpu_offload(value: Any) -> CPUOffload:
    if value is None or isinstance(value, bool):
        return CPUOffload(offload_params=bool(value))
    return own(value, CPUOffload) or refuse_type("cpu_offload", value, "None, a bool, or a CPUOffload")


def _mixed_precision(value: Any) -> MixedPrecision:
    """A dtype sets only the param dtype: gradients are then reduced in it as well, as for any MixedPrecision."""
    if value is None or isinstance(value, torch.dtype):
        value = MixedPrecision(param_dtype=value)
    precision = own(value, MixedPrecision) or refuse_type(
        "mixed_precision", value, "None, a floating-point torch.dtype (the param_dtype), or a MixedPrecision"
    )
    casts = precision.param_dtype is not None or precision.buffer_dtype is not None
    if casts and not precision.full_precision_in_eval and os.environ.get(_IN_EVAL) == "1":
        if fsdp1_mode.active:
            return replace(precision, full_precision_in_eval=True)
        warn_once(
            _IN_EVAL,
            f"mixed_precision: {_IN_EVAL}=1 is set in the environment, but it takes effect only in programs under "
            "flatfsdp.as_torch: this model is evaluated in low precision. Pass MixedPrecision(..., "
            "full_precision_in_eval=True).",
        )
    return precision


def _policy(value: Any) -> Any:
    argument = "auto_wrap_policy"
    if value is None or (callable(getattr(value, "_run_policy", None)) and not isinstance(value, type)):
        return value
    is_class = isinstance(value, type) and issubclass(value, nn.Module)
    if is_class or isinstance(value, (set, frozenset, list, tuple, nn.Module)):
        classes = frozenset(check_module_classes(argument, (value,) if isinstance(value, nn.Module) else value))
        return classes or refuse_value(argument, value, "at least one class, or None to wrap no submodules")
    if isinstance(value, type) or not callable(value):
        refuse_type(
            argument,
            value,
            "None, a policy of flatfsdp.wrap, a callable (module, recurse, nonwrapped_numel) -> bool, "
            "or a set of module classes",
        )
    return _policy_function(argument, value)


def _policy_function(argument: str, policy: Callable[..., Any]) -> Callable[..., Any]:
    try:
        signature = inspect.signature(policy)
    except ValueError:  # a builtin or extension function without a signature: fails only when called
        return policy
    try:
        signature.bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError as missing:
        try:
            signature.bind(None, True, 0)
        except TypeError:
            raise ConfigTypeError(
                f"{argument}: {shown(policy)} cannot be called as policy(module=..., recurse=..., "
                f"nonwrapped_numel=...): {missing}. Bind its other arguments with functools.partial."
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
            f"ignored_states: got {len(params)} parameters and {len(of_states)} modules. Accepted: only parameters, "
            "or only modules. Pass the parameters of those modules instead of the modules."
        )
    ignored = modules + of_states
    if any(each is module for each in ignored):
        warn(
            f"{'ignored_modules' if modules else 'ignored_states'}: got the module to be wrapped itself "
            f"({type(module).__name__}), which leaves nothing to shard and no gradient to average. Pass modules "
            "inside it."
        )
    outside = [type(each).__name__ for each in set(ignored).difference(module.modules())]
    outside += ["a parameter"] * len(set(params).difference(module.parameters()))
    if outside:
        warn(
            f"{'ignored_modules' if modules else 'ignored_states'}: {', '.join(outside)} not found inside "
            f"{type(module).__name__}; ignoring them has no effect."
        )
    return ignored, params


def _elements(argument: str, value: Any, classes: tuple[type, ...], accepted: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, classes):  # some modules, and all parameters, are iterable themselves
        return (value,)
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        refuse_type(argument, value, f"None, or an iterable of {accepted}")
    elements = tuple(value)
    for position, element in enumerate(elements):
        if not isinstance(element, classes):
            hint = "Pass the objects themselves, not their names." if isinstance(element, str) else ""
            refuse_type(f"{argument}[{position}]", element, accepted, hint=hint)
    return elements


def _param_init_fn(value: Any) -> Any:
    if value is not None and (not callable(value) or isinstance(value, type)):
        refuse_type("param_init_fn", value, "None, or a callable (module) -> None")
    return value


def _device_id(value: Any) -> int | torch.device | None:
    accepted = 'None, the index of an accelerator, a torch.device, or its name such as "cuda:0"'
    if isinstance(value, bool) or not isinstance(value, (int, str, torch.device, type(None))):
        refuse_type("device_id", value, accepted)
    if isinstance(value, int) and value < 0:
        refuse_value("device_id", value, accepted)
    if isinstance(value, str):
        try:
            value = torch.device(value)
        except RuntimeError:
            refuse_value("device_id", value, accepted)
    if isinstance(value, torch.device) and value.type == "meta":
        refuse_value("device_id", value, accepted, hint="The meta device cannot compute anything.")
    return value


def _reshard_after_forward(value: Any) -> bool | int | None:
    if value is not None and not isinstance(value, int):
        refuse_type("reshard_after_forward", value, "True, False, a number of ranks, or None")
    return value


def _bools(**flags: Any) -> dict[str, bool]:
    for name, flag in flags.items():
        check_bool(name, flag)
    return flags


def _one_of(argument: str, value: Any, *choices: str) -> Any:
    accepted = ", ".join(f'"{choice}"' for choice in choices)
    if not isinstance(value, str):
        refuse_type(argument, value, accepted)
    if value not in choices:
        refuse_value(argument, value, accepted, hint=did_you_mean(value, choices))
    return value


def _layout(value: Any) -> Any:
    """Grains are resolved later, where the model's parameters are known by name."""
    if isinstance(value, Mapping) or (callable(value) and not isinstance(value, str) and not _is_other_class(value)):
        return value
    if not isinstance(value, str):
        accepted = (
            '"flat", "rows", a mapping from names or modules to grains, a callable (name, parameter) -> grain, or a '
            "class of optimizers"
        )
        refuse_type("layout", value, accepted)
    return _one_of("layout", value, "flat", "rows")


def _is_other_class(value: object) -> bool:
    return isinstance(value, type) and not issubclass(value, torch.optim.Optimizer)


def _check_combination(config: Config) -> Config:
    """`config`; raises ConfigValueError for conflicting arguments, and warns of arguments that have no effect."""
    strategy, precision = config.sharding_strategy, config.mixed_precision
    if config.process_group is not None and config.device_mesh is not None:
        raise ConfigValueError("process_group, device_mesh: got both. Accepted: one of them.")
    if strategy in HYBRIDS and config.process_group is config.device_mesh is config.auto_wrap_policy is None:
        raise ConfigValueError(
            f"sharding_strategy: got {strategy.name} without process_group, device_mesh or auto_wrap_policy. Units "
            "that are wrapped one by one would each create groups of their own. Accepted: a pair (shard group, "
            "replicate group) as process_group, a 2-D device_mesh, or an auto_wrap_policy, whose units share one pair."
        )
    if strategy not in HYBRIDS and config.device_mesh is not None and config.device_mesh.ndim == 2:
        warn(
            f"device_mesh: {strategy.name} uses only axis 0 of a 2-D mesh; ranks along axis 1 exchange nothing here. "
            "If this is intentional (tensor parallelism), pass the 1-D mesh of axis 0; to replicate, use HYBRID_SHARD."
        )
    if strategy is ShardingStrategy.NO_SHARD and config.forward_prefetch:
        warn("forward_prefetch: True has no effect with NO_SHARD, which never gathers parameters.")
    if strategy is ShardingStrategy.NO_SHARD and precision.gather_dtype is not None:
        warn("mixed_precision: gather_dtype has no effect with NO_SHARD, which never gathers parameters.")
    if precision.keep_low_precision_grads and precision.param_dtype is precision.reduce_dtype is None:
        warn(
            "mixed_precision: keep_low_precision_grads=True has no effect while param_dtype and reduce_dtype are None: "
            "there are no low-precision gradients to keep."
        )
    if precision.param_dtype in (torch.float16, torch.bfloat16) and precision.reduce_dtype is None:
        warn(
            f"mixed_precision: param_dtype={precision.param_dtype} with reduce_dtype=None sums gradients across ranks "
            f"in {precision.param_dtype}, too: small gradients are lost when there are many ranks. Pass "
            f"reduce_dtype=torch.float32 for full-precision sums, or reduce_dtype={precision.param_dtype} to keep "
            "this behavior without the warning."
        )
    return config


# --- Classes of torch with the same names -----------------------------------------------------------------------------

_EnumT = TypeVar("_EnumT", bound=Enum)
_ConfigT = TypeVar("_ConfigT")


def member(
    argument: str, value: Any, cls: type[_EnumT], *, suffix: str = "", is_optional: bool = True
) -> _EnumT | None:
    """``value`` as a member of ``cls``: a member, its name in upper or lower case, or torch's member of the same name.

    ``suffix`` may be omitted from names. ``is_optional``: None is accepted, and returned."""
    if isinstance(value, cls) or (value is None and is_optional):
        return value
    names = list(cls.__members__)
    accepted = f"{'None, ' if is_optional else ''}a {cls.__name__}, or its name ({', '.join(names)})"
    if isinstance(value, Enum) and type(value).__name__ == cls.__name__:
        value = value.name
    if not isinstance(value, str):
        refuse_type(argument, value, accepted)
    for name in names:
        if value.upper().lstrip("_") in (name.lstrip("_"), name.removesuffix(suffix)):
            return cls[name]
    refuse_value(argument, value, accepted, hint=did_you_mean(value.upper(), names))


def own(value: Any, cls: type[_ConfigT]) -> _ConfigT | None:
    """``value`` as an instance of ``cls``; torch's config of that name is converted; None for other values."""
    if isinstance(value, cls):
        return value
    if isinstance(value, type) or type(value).__name__ != cls.__name__:
        return None
    names = [each.name for each in fields(cast(Any, cls)) if hasattr(value, each.name)]
    return cls(**{name: getattr(value, name) for name in names})
