"""What a state dict is to hold: FSDP1's enums and configs of the same names, with their fields, order and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from ...api import check_bool
from ...errors import did_you_mean, refuse_type, refuse_value
from . import fsdp1_mode

__all__ = [
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class StateDictType(Enum):
    """What `state_dict()` of a wrapped model holds of each parameter.

    ``FULL_STATE_DICT``: the whole, as of a model that was never wrapped. ``SHARDED_STATE_DICT``: what this rank owns,
    for `torch.distributed.checkpoint`, loadable by any number of ranks. ``LOCAL_STATE_DICT``: this rank's flat shards,
    for the same number of ranks and the same wrapping.
    """

    FULL_STATE_DICT = 1
    LOCAL_STATE_DICT = 2
    SHARDED_STATE_DICT = 3


class OptimStateKeyType(Enum):
    """By what an optimizer's state is keyed: names of parameters, or their numbers in its param groups."""

    PARAM_NAME = 1
    PARAM_ID = 2


@dataclass
class _Checked:
    def __post_init__(self) -> None:
        for each in fields(self):
            if isinstance(each.default, bool):
                check_bool(f"{type(self).__name__}.{each.name}", getattr(self, each.name))


@dataclass
class StateDictConfig(_Checked):
    """For all types: ``offload_to_cpu`` puts values into host memory of their own."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """``rank0_only``: only rank 0 has values, the dicts of others are empty; loading then takes values from rank 0."""

    rank0_only: bool = False


SHARDED_AS = ("interval", "sharded_tensor", "dtensor", "fsdp1")


def default_carrier() -> str:
    """What carries sharded values where a config does not say."""
    return "fsdp1" if fsdp1_mode.active else "interval"


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """``sharded_as`` (not in torch's FSDP): "interval", an `OwnedInterval`, or "sharded_tensor", which torch's FSDP1
    loads if it wraps the same modules with the same arguments, and `use_orig_params=False`, over as many ranks; or
    "fsdp1", as FSDP1 chooses: a ShardedTensor, and whole values by their names where every rank has all. The default
    is "interval", and "fsdp1" under `flatfsdp.as_torch`.

    Raises:
        ConfigValueError: another ``sharded_as``.
    """

    sharded_as: str = field(default_factory=default_carrier)

    def __post_init__(self) -> None:
        super().__post_init__()
        accepted = [each for each in SHARDED_AS if each != "dtensor"]
        if self.sharded_as not in accepted:
            refuse_value("LocalStateDictConfig.sharded_as", self.sharded_as, " or ".join(map(repr, accepted)))


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """What carries this rank's part of a parameter.

    ``_use_dtensor``: a DTensor. ``sharded_as`` (not in torch's FSDP): "interval", an `OwnedInterval`, made without
    communication; "sharded_tensor" or "dtensor", rows of torch's class of that name, for programs that ask for it;
    "fsdp1", as FSDP1 chooses: a DTensor for what was wrapped with a `device_mesh`, else a ShardedTensor, and whole
    values where every rank has all. The default is "interval", and "fsdp1" under `flatfsdp.as_torch`.

    Raises:
        ConfigValueError: another ``sharded_as``.
    """

    _use_dtensor: bool = False
    sharded_as: str = field(default_factory=default_carrier)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharded_as(self)


@dataclass
class OptimStateDictConfig(_Checked):
    """For all types: ``offload_to_cpu`` puts values into host memory of their own."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """``rank0_only``: only rank 0 has values, the dicts of others are empty."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Local state stays where it is by default."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """As `ShardedStateDictConfig`."""

    _use_dtensor: bool = False
    sharded_as: str = field(default_factory=default_carrier)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sharded_as(self)


def check_sharded_as(config: ShardedStateDictConfig | ShardedOptimStateDictConfig) -> None:
    """Refuse a carrier that nobody knows; `_use_dtensor` chooses one."""
    if config._use_dtensor:
        config.sharded_as = "dtensor"
    if config.sharded_as not in SHARDED_AS:
        refuse_value(f"{type(config).__name__}.sharded_as", config.sharded_as, " or ".join(map(repr, SHARDED_AS)))


@dataclass
class StateDictSettings:
    """A type and the configs for models and for optimizers."""

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def settings(state_dict_type: Any, config: Any = None, optim_config: Any = None) -> StateDictSettings:
    """The arguments of `set_state_dict_type`, checked. Names of members, and torch's own classes, are understood.

    Raises:
        ConfigTypeError, ConfigValueError: no such type, or a config that belongs to another one.
    """
    chosen = _member(state_dict_type)
    kinds = _CONFIGS[chosen]
    return StateDictSettings(
        chosen,
        _config("state_dict_config", config, kinds[0]),
        _config("optim_state_dict_config", optim_config, kinds[1]),
    )


def _member(value: Any) -> StateDictType:
    if isinstance(value, StateDictType):
        return value
    if isinstance(value, Enum) and type(value).__name__ == "StateDictType":
        value = value.name
    names = list(StateDictType.__members__)
    accepted = f"a StateDictType, or its name ({', '.join(names)})"
    if not isinstance(value, str):
        refuse_type("state_dict_type", value, accepted)
    found = next((name for name in names if value.upper() in (name, name.removesuffix("_STATE_DICT"))), None)
    if found is None:
        refuse_value("state_dict_type", value, accepted, hint=did_you_mean(value.upper(), names))
    return StateDictType[found]


def _config(argument: str, value: Any, kind: type[Any]) -> Any:
    if value is None:
        return kind()
    if isinstance(value, kind):
        return value
    if isinstance(value, type) or type(value).__name__ != kind.__name__:
        refuse_type(argument, value, f"None, or a {kind.__name__}, which belongs to that state_dict_type")
    return kind(**{each.name: getattr(value, each.name) for each in fields(kind) if hasattr(value, each.name)})
