"""The types and configs of state dicts: FSDP1's enums and configs, with the same names, fields, order and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar

from ...api import check_bool
from ...errors import refuse_type, refuse_value
from . import fsdp1_mode
from .arguments import member, own

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
    """The form of parameters in the `state_dict()` of a wrapped model.

    ``FULL_STATE_DICT``: full tensors, as in a model that was never wrapped. ``SHARDED_STATE_DICT``: this rank's part of
    each parameter, for `torch.distributed.checkpoint`, loadable by any number of ranks. ``LOCAL_STATE_DICT``: this
    rank's flat shards, for the same number of ranks and the same wrapping.
    """

    FULL_STATE_DICT = 1
    LOCAL_STATE_DICT = 2
    SHARDED_STATE_DICT = 3


class OptimStateKeyType(Enum):
    """The keys of an optimizer's state: names of parameters, or their indices in its param groups."""

    PARAM_NAME = 1
    PARAM_ID = 2


SHARDED_AS = ("interval", "sharded_tensor", "dtensor", "fsdp1")


def default_carrier() -> str:
    """The default of ``sharded_as``."""
    return "fsdp1" if fsdp1_mode.active else "interval"


@dataclass
class _Checked:
    _carriers: ClassVar[tuple[str, ...]] = SHARDED_AS  # the accepted values of `sharded_as`, if there is one

    def __post_init__(self) -> None:
        name = type(self).__name__
        for each in fields(self):
            if isinstance(each.default, bool):
                check_bool(f"{name}.{each.name}", getattr(self, each.name))
        if getattr(self, "_use_dtensor", False):
            self.sharded_as = "dtensor"
        if hasattr(self, "sharded_as") and self.sharded_as not in self._carriers:
            refuse_value(f"{name}.sharded_as", self.sharded_as, " or ".join(map(repr, self._carriers)))


@dataclass
class StateDictConfig(_Checked):
    """Options of all types. ``offload_to_cpu``: values are copied into host memory of their own."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """``rank0_only``: only rank 0 has values, and the dicts of other ranks are empty; loading then uses the values of
    rank 0."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """``sharded_as`` (not in torch's FSDP): "interval", an `OwnedInterval`; or "sharded_tensor", which torch's FSDP1
    loads if it wraps the same modules with the same arguments, and `use_orig_params=False`, over as many ranks; or
    "fsdp1", the choice of FSDP1: a ShardedTensor, or full values by name if every rank has all of them. The default is
    "interval", and "fsdp1" under `flatfsdp.as_torch`.

    Raises:
        ConfigValueError: ``sharded_as`` has another value.
    """

    _carriers = tuple(each for each in SHARDED_AS if each != "dtensor")
    sharded_as: str = field(default_factory=default_carrier)


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """The class of values that hold this rank's part of a parameter.

    ``_use_dtensor``: a DTensor. ``sharded_as`` (not in torch's FSDP): "interval", an `OwnedInterval`, made without
    communication; "sharded_tensor" or "dtensor", rows in torch's class of that name, for programs that need it;
    "fsdp1", the choice of FSDP1: a DTensor for modules wrapped with a `device_mesh`, else a ShardedTensor, or full
    values if every rank has all of them. The default is "interval", and "fsdp1" under `flatfsdp.as_torch`.

    Raises:
        ConfigValueError: ``sharded_as`` has another value.
    """

    _use_dtensor: bool = False
    sharded_as: str = field(default_factory=default_carrier)


@dataclass
class OptimStateDictConfig(_Checked):
    """Options of all types. ``offload_to_cpu``: values are copied into host memory of their own."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """``rank0_only``: only rank 0 has values, and the dicts of other ranks are empty."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """As `OptimStateDictConfig`, but local state stays on its device by default."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """As `ShardedStateDictConfig`."""

    _use_dtensor: bool = False
    sharded_as: str = field(default_factory=default_carrier)


@dataclass
class StateDictSettings:
    """A type, and its configs for models and for optimizers."""

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def settings(state_dict_type: Any, config: Any = None, optim_config: Any = None) -> StateDictSettings:
    """The validated arguments of `set_state_dict_type`. Names of members, and torch's own classes, are accepted.

    Raises:
        ConfigTypeError, ConfigValueError: the type does not exist, or a config belongs to another type.
    """
    chosen = member("state_dict_type", state_dict_type, StateDictType, suffix="_STATE_DICT", is_optional=False)
    assert chosen is not None
    classes = _CONFIGS[chosen]
    return StateDictSettings(
        chosen,
        _config("state_dict_config", config, classes[0]),
        _config("optim_state_dict_config", optim_config, classes[1]),
    )


def _config(argument: str, value: Any, cls: type[Any]) -> Any:
    accepted = f"None, or a {cls.__name__}, the class for that state_dict_type"
    return cls() if value is None else own(value, cls) or refuse_type(argument, value, accepted)
